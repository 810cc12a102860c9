"""Findings and a run, made by hand, as sinks get them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rankscope.bus.finding import Finding, Severity
from rankscope.sinks import RunInfo

FINDING = Finding(
    id="data.duplicate_batches-1",
    cause="data.duplicate_batches",
    severity=Severity.WARNING,
    ranks=(1, 3),
    first_step=2,
    last_step=5,
    explanation="Ranks 1 and 3 train on the same samples; it's 50 % of <the batch>.",
    next_check="Look at the sampler.",
    evidence={"share": np.float64(0.5), "steps": np.array([2, 5]), "ratio": float("inf")},
    step=5,
)


def finding(**changes: object) -> Finding:
    return replace(FINDING, **changes)  # type: ignore[arg-type]


def run_info(path: Path, **changes: object) -> RunInfo:
    info = RunInfo(path / "run", 4, {"name": "a run"}, {"tier": "sketch"})
    info.run_dir.mkdir(parents=True, exist_ok=True)
    return replace(info, **changes)  # type: ignore[arg-type]
