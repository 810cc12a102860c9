"""What the whole diagnosis says of healthy jobs whose workers are not exchangeable."""

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import detection_streams as streams
import numpy as np
from detection_faults import Noise

from rankscope.bus.detector import RunFacts
from rankscope.bus.step import GatheredStep
from rankscope.verdict.diagnosis import Diagnosis

WORKERS, STEPS, RUNS = 8, 300, 12
REPLAYED = "each worker replays four batches"
UNEQUAL = "half as many samples on one worker"
Known = Callable[[GatheredStep, int], dict[str, Any]]


def replayed(gathered: GatheredStep, step: int) -> dict[str, Any]:
    """Return what samples tell: which of its batches each worker has."""
    digests_W = 100 * np.arange(WORKERS) + step % streams.OWN_BATCHES
    return {"batch_digest": digests_W, "num_samples": np.full(WORKERS, 4)}


def unequal(gathered: GatheredStep, step: int) -> dict[str, Any]:
    """Return what samples tell: that the last worker has half as many."""
    sizes_W = np.full(WORKERS, 4)
    sizes_W[-1] = 2
    return {"num_samples": sizes_W}


def measure(scale: float) -> dict[str, Any]:
    """Return the number of runs, and for each stream in how many of them something is said."""
    runs = max(2, int(RUNS * scale))
    cases: list[tuple[str, str, Known | None]] = [(name, name, None) for name in streams.OUTSIDE]
    cases += [
        (f"{REPLAYED}, samples known", REPLAYED, replayed),
        (f"{UNEQUAL}, samples known", UNEQUAL, unequal),
    ]
    streams_say = {name: _say(name, stream, known, runs) for name, stream, known in cases}
    return {"runs": runs, "steps": STEPS, "streams": streams_say}


def _say(name: str, stream: str, known: Known | None, runs: int) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for run in range(runs):
        counts.update(_findings(streams.OUTSIDE[stream], known, [zlib.crc32(name.encode()), run]))
    return dict(counts.most_common())


def _findings(make: streams.Make, known: Known | None, seed: list[int]) -> set[str]:
    """Run one job; loss, gradient norm and direction follow the stream."""
    rng = np.random.default_rng(seed)
    diagnosis = Diagnosis(RunFacts(WORKERS))
    said = set()
    for step, values_SW in enumerate(islice(make(rng, (3, WORKERS)), STEPS)):
        noise = Noise.draw(rng, WORKERS)
        noise.loss_W, noise.norm_W, noise.cosine_W = values_SW
        report = noise.to_report(step)
        if known is not None:
            workers = {**report.gathered.workers, **known(report.gathered, step)}
            report = replace(report, gathered=replace(report.gathered, workers=workers))
        for event in diagnosis.observe(report):
            said.add(f"{event.cause} ({event.severity})")
    return said


if __name__ == "__main__":
    for words, says in measure(0.2)["streams"].items():
        print(words, says)
