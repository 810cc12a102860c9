"""Runs faults on real ranks and scores what the monitor says of them."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rankscope import Finding, Run, Severity
from rankscope.verdict.rules import ranked

from .catalogue import Fault, FaultClass, Hits, UsageError
from .injectors import INJECTORS
from .job import PATIENCE_SECONDS, Trial
from .pool import Outcome, WorkerPool

START = 20
"""The step at which a fault begins that can begin in the middle of a run."""

_STEPS = {FaultClass.STATISTICAL: 250, FaultClass.HEALTHY: 300}
_STEPS_OF_OTHERS = 120
_FEWEST_WORKERS = 2
_SECONDS_OF_A_STEP = 5.0  # a trial that takes longer counts as hung

SHIFT_SIGNALS = ("loss", "grad_norm", "cosine_rest")
_FEWEST_OTHERS = 2

_PLAIN = ("detected", "delay", "rank_named", "cause_rank", "severe_enough", "shift", "problem")
"""Attributes of a score that are plain JSON values."""
FULL_WORKERS = (4, 8)
FULL_SEEDS = (0, 1, 2)
FULL_HEALTHY_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Score:
    """What the monitor said of one trial.

    Attributes:
        fault: What was wrong.
        num_workers: W.
        seed: The trial's seed.
        num_steps: Steps that it ran.
        detected: Whether a finding of enough severity opened at or after the fault's begin.
        delay: Steps from there until it opened; None when nothing did.
        rank_named: Whether the most probable finding names exactly the workers that are hit.
        cause_rank: Place of an expected cause among the findings, from 1; None when absent.
        severe_enough: Whether a finding of an expected cause is as severe as the catalogue says.
        false_alarms: Causes of findings of a warning or more before the fault began; in a healthy
            job, of any.
        findings: What was found in the end, the most probable cause first.
        shift: How far the worker that is hit stands apart, in standard deviations; None unless the
            fault is statistical and hits one worker.
        problem: Why the trial did not end, or what the monitor could not do.
        seconds: How long it took.
    """

    fault: Fault
    num_workers: int
    seed: int
    num_steps: int
    detected: bool
    delay: int | None
    rank_named: bool
    cause_rank: int | None
    severe_enough: bool
    false_alarms: tuple[str, ...]
    findings: tuple[Finding, ...]
    shift: float | None
    problem: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether all is as the catalogue says.

        The fault is detected, worker and cause are named, the severity suffices, and nothing was a
        false alarm. Of a statistical fault, the cause may be the second. Where no finding is
        expected, there must be none beyond notes.
        """
        if self.problem or self.false_alarms:
            return False
        if not self.fault.expects_finding:
            return not self.detected
        places = (1, 2) if self.fault.fault_class is FaultClass.STATISTICAL else (1,)
        named = self.rank_named and self.cause_rank in places
        return self.detected and named and self.severe_enough

    def to_json(self) -> dict[str, Any]:
        """Return the score as plain JSON values."""
        return {
            "id": self.fault.id,
            "class": str(self.fault.fault_class),
            "workers": self.num_workers,
            "seed": self.seed,
            "steps": self.num_steps,
            "as_expected": self.as_expected,
            **{name: getattr(self, name) for name in _PLAIN},
            "expected_causes": list(self.fault.causes),
            "false_alarms": list(self.false_alarms),
            "seconds": round(self.seconds, 2),
            "findings": [finding.to_json() for finding in self.findings],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], catalogue: Mapping[str, Fault]) -> Self:
        """Read a score as :meth:`to_json` writes it.

        Args:
            values: Its plain values.
            catalogue: The faults by id.

        Raises:
            KeyError: A value is missing, or the catalogue has no such fault.
        """
        return cls(
            fault=catalogue[values["id"]],
            num_workers=int(values["workers"]),
            seed=int(values["seed"]),
            num_steps=int(values["steps"]),
            **{name: values[name] for name in _PLAIN},
            false_alarms=tuple(values["false_alarms"]),
            findings=tuple(Finding.from_json(finding) for finding in values["findings"]),
            seconds=float(values["seconds"]),
        )


class Bench:
    """Runs faults on warm workers. A context manager: it ends its workers when it is left.

    Args:
        keep: Directory in which the run directories are left; None: they are removed.
    """

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep
        self._pool: WorkerPool | None = None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.__exit__(*error)  # type: ignore[arg-type]
            self._pool = None

    def run(
        self, fault: Fault, *, num_workers: int = 4, seed: int = 0, num_steps: int | None = None
    ) -> Score:
        """Run one fault.

        Args:
            fault: A row of the catalogue.
            num_workers: W.
            seed: Decides data, initial weights, and the worker that is hit.
            num_steps: Optimizer steps; by default what the fault's class needs.

        Raises:
            UsageError: The fault is not reproduced, or cannot run in this way.
        """
        check(fault, num_workers, num_steps, seed)
        steps = num_steps or steps_of(fault)
        with self._directory(f"{fault.id}-w{num_workers}-s{seed}") as run_dir:
            trial = Trial(fault.id, num_workers, seed, steps, min(START, steps // 2), run_dir)
            outcome = self._workers(num_workers).run(
                trial, PATIENCE_SECONDS + steps * _SECONDS_OF_A_STEP
            )
            return score(fault, trial, outcome)

    def _workers(self, num_workers: int) -> WorkerPool:
        if self._pool is not None and self._pool.num_workers != num_workers:
            self._pool.__exit__(None, None, None)
            self._pool = None
        self._pool = self._pool or WorkerPool(num_workers)
        return self._pool

    @contextmanager
    def _directory(self, name: str) -> Iterator[Path]:
        if self._keep is None:
            with tempfile.TemporaryDirectory(prefix="rankscope-faults-") as folder:
                yield Path(folder) / name
            return
        path = self._keep / name
        if Run.is_run(path):
            raise UsageError(
                f"{path} already holds a run: choose another directory to keep runs in"
            )
        yield path


def steps_of(fault: Fault, *, full: bool = False) -> int:
    """Return how many steps a run of a fault has, unless the user chooses."""
    if full and fault.healthy:
        return FULL_HEALTHY_STEPS
    return _STEPS.get(fault.fault_class, _STEPS_OF_OTHERS)


def check(fault: Fault, num_workers: int, num_steps: int | None, seed: int = 0) -> None:
    """Raise a UsageError when a fault cannot be run in this way."""
    if fault.missing:
        raise UsageError(f"{fault.id} is not reproduced: {fault.missing}")
    if num_workers < _FEWEST_WORKERS:
        raise UsageError(f"expected at least {_FEWEST_WORKERS} workers, got {num_workers}")
    if num_steps is not None and num_steps < 2:
        raise UsageError(f"expected at least 2 steps, got {num_steps}")
    if seed < 0:
        raise UsageError(f"expected a seed of 0 or more, got {seed}")


def score(fault: Fault, trial: Trial, outcome: Outcome) -> Score:
    """Compare what the monitor said with what the catalogue expects."""
    start = 0 if fault.healthy else INJECTORS[fault.id].begin(trial)
    events = [event for path in outcome.directories for event in read_events(path)]
    opened = [e.step for e in events if e.severity >= fault.threshold and e.step >= start]
    alarms = [e for e in events if e.severity >= Severity.WARNING]
    unjustified = [e.cause for e in alarms if fault.healthy or e.step < start]
    run = Run.open(outcome.directories[-1]) if outcome.directories else None
    findings = tuple(ranked(() if run is None else run.findings()))
    num_workers = trial.num_workers if run is None else run.num_workers
    counted = [finding for finding in findings if finding.severity >= fault.threshold]
    expected = [finding for finding in findings if finding.cause in fault.causes]
    places = [n for n, one in enumerate(counted, start=1) if one.cause in fault.causes]
    return Score(
        fault=fault,
        num_workers=trial.num_workers,
        seed=trial.seed,
        num_steps=trial.num_steps,
        detected=bool(opened),
        delay=min(opened) - start if opened else None,
        rank_named=bool(counted)
        and names_the_workers(counted[0], fault, trial.worker, num_workers),
        cause_rank=places[0] if places else None,
        severe_enough=any(one.severity >= fault.least for one in expected),
        false_alarms=tuple(dict.fromkeys(unjustified)),
        findings=findings,
        shift=_shift(fault, trial, start, outcome),
        problem=outcome.problem,
        seconds=outcome.seconds,
    )


def _shift(fault: Fault, trial: Trial, start: int, outcome: Outcome) -> float | None:
    alone = fault.fault_class is FaultClass.STATISTICAL and fault.hits is Hits.ONE
    if not alone or not outcome.directories:
        return None
    return lasting_shift(Run.open(outcome.directories[-1]), trial.worker, start)


def lasting_shift(run: Run, worker: int, start: int) -> float | None:
    """Return the largest mean shift of one worker against the others, over the signals.

    In each signal, ``|mean_t (x_t - mean of the others_t)| / s``, where s is the standard
    deviation of the others around their mean of the same step, pooled over steps.

    Args:
        run: A recorded run.
        worker: Rank of the worker.
        start: First step that counts.

    Returns:
        The shift in standard deviations; None when there are fewer than two others, or nothing
        was measured.

    Raises:
        RunError: A file of the run cannot be read.
    """
    sizes = []
    for name in SHIFT_SIGNALS:
        steps_T, values_TW = run.per_worker(name)
        size = _shift_of(values_TW[steps_T >= start], worker)
        if size is not None:
            sizes.append(size)
    return max(sizes, default=None)


def _shift_of(values_TW: NDArray[np.float64], worker: int) -> float | None:
    values_TW = values_TW[np.isfinite(values_TW).all(axis=1)]
    others_TV = np.delete(values_TW, worker, axis=1)
    if not len(values_TW) or others_TV.shape[1] < _FEWEST_OTHERS:
        return None
    spread = float(np.sqrt(others_TV.var(axis=1, ddof=1).mean()))
    distance = float((values_TW[:, worker] - others_TV.mean(axis=1)).mean())
    return abs(distance) / spread if spread > 0 else None


def names_the_workers(finding: Finding, fault: Fault, worker: int, num_workers: int) -> bool:
    """Return whether a finding names exactly the workers that are hit; nobody stands for all.

    On a mesh, a run has fewer workers than the trial has ranks.
    """
    if fault.hits is Hits.ONE:
        return finding.ranks == (worker,)
    if fault.hits is Hits.OTHERS:
        return finding.ranks == tuple(range(1, num_workers))
    return set(finding.ranks) in (set(), set(range(num_workers)))


def read_events(run_dir: Path) -> list[Finding]:
    """Return all events of a run's ``findings.jsonl``, in order: how its findings developed."""
    file = run_dir / "findings.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return [Finding.from_json(json.loads(line)) for line in lines]
