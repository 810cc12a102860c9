"""Processor time and memory of what the root agent does with a step: statistics, verdict, record.

Steps of a made-up healthy job (24 blocks, embedding and head; sketches; samples drawn as a
``DistributedSampler`` would; a thread to itself) run through the agent's chain in batches:
``amend``, ``summarize``, ``Diagnosis.observe_many``, ``RunWriter.add_many``, and
the flushes that follow. Times are of the process, with all its threads.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import StepBatch
from rankscope.evidence import columns_of
from rankscope.evidence.loss.combine import amend
from rankscope.record import RunWriter
from rankscope.stats.arrays import MISSING_INT
from rankscope.verdict.diagnosis import Diagnosis

GROUPS = ("embedding", *(f"layers.{layer}" for layer in range(24)), "head")
SKETCH, GROUP_SKETCH = 4093, 251
BATCH = 8
SAMPLES = 200_000
_MISSING = {DType.FLOAT: np.nan, DType.INT: MISSING_INT, DType.BOOL: False}
_NUMPY = {DType.FLOAT: np.float64, DType.INT: np.int64, DType.BOOL: np.bool_}


class MadeUpJob:
    """A healthy job, step by step.

    Args:
        num_workers: W.
        groups: Names of the parameter groups.
        sketch: Numbers in a sketch of the whole gradient.
        seed: Of everything random.
    """

    def __init__(
        self, num_workers: int, groups: Sequence[str] = GROUPS, sketch: int = SKETCH, seed: int = 0
    ) -> None:
        self._width = num_workers
        self._groups = tuple(groups)
        self._rng = np.random.default_rng(seed)
        self._common = self._rng.normal(size=sketch).astype(np.float32)
        self._narrow = min(sketch, GROUP_SKETCH)
        self._samples = self._sharded()

    def step(self, number: int, *, observed: bool) -> GatheredStep:
        """Return a step; to be asked for in order."""
        width, rng = self._width, self._rng
        ends: dict[str, Any] = {}
        columns = self._columns(number, observed=observed)
        sketches_WK: np.ndarray[Any, Any] | None = None
        if observed:
            noise_WK = rng.standard_normal((width, len(self._common)), np.float32)
            sketches_WK = self._common + 2 * noise_WK * rng.lognormal(0.0, 0.1, (width, 1))
            sketches_WK = sketches_WK.astype(np.float32)
            columns["grad_norm"] = np.linalg.norm(sketches_WK.astype(np.float64), axis=1)
            reduced = float(np.linalg.norm(sketches_WK.mean(axis=0, dtype=np.float64)))
            columns["reduced_norm"] = np.full(width, reduced)
            noise_WGK = rng.standard_normal((width, len(self._groups), self._narrow), np.float32)
            ends = {
                "groups": self._groups,
                "group_norms_WG": rng.lognormal(0.0, 0.2, (width, len(self._groups))),
                "group_sketches_WGK": noise_WGK + self._common[: self._narrow],
                "residuals_WG": rng.uniform(2e-7, 4e-7, (width, len(self._groups))),
                "total_residuals_W": rng.uniform(2e-7, 4e-7, width),
            }
        return GatheredStep(
            step=number,
            time=1.7e9 + 0.1 * number,
            observed=observed,
            workers=columns,
            sketches_WK=sketches_WK,
            samples=next(self._samples),
            micro_losses=tuple(rng.normal(2.0, 0.1, (width, 1))),
            micro_weights=tuple(np.full((width, 1), 1024.0)),
            micro_norms=tuple(rng.lognormal(0.0, 0.2, (width, 1))) if observed else (),
            micro_scales=tuple(np.ones((width, 1))),
            reduced_copies=width,
            **ends,
        )

    def _columns(self, number: int, *, observed: bool) -> dict[str, np.ndarray[Any, Any]]:
        width, rng = self._width, self._rng
        nothing = np.full(width, np.nan)
        columns: dict[str, Any] = {
            "loss": 2 + rng.normal(0, 0.1, width),
            "loss_weight": rng.integers(900, 1100, width),
            "loss_sem": rng.uniform(0.08, 0.12, width),
            "grad_max": rng.lognormal(-3, 0.2, width) if observed else nothing,
            "grad_nonfinite": 0,
            "grad_scale": 1.0,
            "num_samples": BATCH,
            "samples_named": True,
            "batch_digest": rng.integers(-(2**62), 2**62, width),
            "lr": 1e-4,
            "weight_decay": 0.01,
            "settings_digest": 77,
            "optimizer_steps": 1,
            "replica": 0,
            "state_layout": 5,
            "param_digest": number,
            "buffer_digest": 3,
            "optimizer_digest": number + 1,
            "reduced_digest": number + 2 if observed else MISSING_INT,
            "applied_digest": number + 2 if observed else MISSING_INT,
            "applied_scale": 1.0 if observed else nothing,
            "precision": 9,
            "rng_used": 4,
            "rng_digest": rng.integers(-(2**62), 2**62, width),
            "step_seconds": rng.normal(0.1, 0.002, width),
            "busy_seconds": rng.normal(0.08, 0.002, width),
            "overhead_seconds": rng.normal(1e-3, 1e-4, width),
        }
        return {
            s.name: np.full(width, _MISSING[s.dtype], _NUMPY[s.dtype])
            if s.name not in columns
            else np.broadcast_to(np.asarray(columns[s.name], _NUMPY[s.dtype]), width).copy()
            for s in columns_of(Table.WORKERS, Source.LOCAL)
        }

    def _sharded(self) -> Iterator[tuple[np.ndarray[Any, Any], ...]]:
        at_once = self._width * BATCH
        while True:
            order_N = self._rng.permutation(SAMPLES)
            for start in range(0, SAMPLES - at_once + 1, at_once):
                yield tuple(order_N[start : start + at_once].reshape(BATCH, self._width).T.copy())


class Chain:
    """The root's work on steps, with the processor time of each part.

    Args:
        num_workers: W.
        path: The run directory.

    Attributes:
        seconds: Processor time so far, by part.
    """

    def __init__(self, num_workers: int, path: Path) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.diagnosis = Diagnosis(RunFacts(num_workers))
        self._writer = RunWriter(path, {"num_workers": num_workers})

    def take(self, steps: Sequence[GatheredStep]) -> None:
        """Take consecutive steps."""
        unscaled = self._timed("amend", lambda: [amend(s) for s in steps])
        reports = self._timed("summarize", lambda: [summarize(step) for step in unscaled])
        self._timed("observe_many", partial(self.diagnosis.observe_many, reports))
        self._timed("add_many", partial(self._writer.add_many, reports))

    def flush(self) -> None:
        """Write what has come since the last time."""
        self._timed("flush", self._writer.flush)

    def close(self) -> None:
        """End the run."""
        self._timed("close", self._writer.close)

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        self.seconds[part] += time.process_time() - start
        return result


class TimedDetectors:
    """Adds up the processor time of each detector of a diagnosis."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for detector in diagnosis._detectors:
            detector.observe = self._timed(detector, detector.observe)  # type: ignore[method-assign]

    def _timed(self, detector: object, observe: Callable[..., Any]) -> Callable[..., Any]:
        def timed(steps: StepBatch) -> Iterator[Any]:
            found = iter(observe(steps))
            for _ in steps:
                start = time.thread_time()
                now = next(found)
                self.seconds[type(detector).__name__] += time.thread_time() - start
                yield now

        return timed


def measure(
    num_workers: int, num_steps: int, batch: int, *, observed: bool, by_detector: bool
) -> dict[str, float]:
    """Return milliseconds a step by part, after as many steps of warm-up as a run has at first."""
    job, warm_up = MadeUpJob(num_workers), 64
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(num_workers, Path(folder) / "run")
        numbers = range(warm_up + num_steps)
        for start in range(0, len(numbers), batch):
            if start >= warm_up > start - batch:
                chain.flush()
                chain.seconds.clear()
                detectors = TimedDetectors(chain.diagnosis) if by_detector else None
            chain.take([job.step(n, observed=observed) for n in numbers[start : start + batch]])
        chain.flush()
        parts = dict(chain.seconds)
        if by_detector and detectors is not None:
            parts |= {f"  {name}": s for name, s in sorted(detectors.seconds.items())}
        chain.close()
    return {name: 1e3 * seconds / num_steps for name, seconds in parts.items()}


def run_all(
    workers: Sequence[int] = (2, 8, 64), batches: Sequence[int] = (1, 16), steps: int = 256
) -> list[dict[str, Any]]:
    """Return a row for each number of workers, observed or not, and each size of batch."""
    return [
        {
            "workers": each,
            "observed": observed,
            "batch": batch,
            "ms": sum(measure(each, steps, batch, observed=observed, by_detector=False).values()),
        }
        for each in workers
        for observed in (True, False)
        for batch in batches
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| workers | gradients | steps at once | ms per step |", "|---|---|---|---|"]
    lines += [
        f"| {row['workers']} | {'measured' if row['observed'] else 'not measured'} "
        f"| {row['batch']} | {row['ms']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def resident_bytes() -> int:
    """Return the memory of this process that is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def watch_memory(num_steps: int, observed_every: int, flush_every: int) -> None:
    """Print the resident memory of a long run of quick steps, ten times."""
    job = MadeUpJob(2, ("layers.0", "head"), sketch=61)
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(2, Path(folder) / "run")
        for start in range(0, num_steps, 50):
            numbers = range(start, min(start + 50, num_steps))
            chain.take([job.step(n, observed=n % observed_every == 0) for n in numbers])
            if numbers[-1] % flush_every == flush_every - 1:
                chain.flush()
            if (numbers[-1] + 1) % (num_steps // 10) == 0:
                print(f"{numbers[-1] + 1:>8,} steps {resident_bytes() / 1e6:8.1f} MB", flush=True)
        chain.close()


def main() -> None:
    """Print milliseconds of processor time per step, or the memory of a long run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--detectors", action="store_true", help="each detector's time, too")
    parser.add_argument("--memory", type=int, metavar="STEPS", help="memory over so many steps")
    parser.add_argument("--observed-every", type=int, default=10)
    parser.add_argument("--flush-every", type=int, default=500, help="steps, with --memory")
    options = parser.parse_args()
    if options.memory:
        watch_memory(options.memory, options.observed_every, options.flush_every)
        return
    for workers in options.workers:
        for observed in (True, False):
            for batch in options.batch:
                parts = measure(
                    workers,
                    options.steps,
                    batch,
                    observed=observed,
                    by_detector=options.detectors,
                )
                total = sum(ms for name, ms in parts.items() if not name.startswith(" "))
                words = "observed" if observed else "not observed"
                print(f"W = {workers}, {words}, batches of {batch}: {total:.3f} ms a step")
                for name, ms in parts.items():
                    print(f"    {name:<22} {ms:.3f}")


if __name__ == "__main__":
    main()
