"""What a step costs the diagnosis: time on one core, outside of the training thread, and memory."""

import time
from typing import Any

import numpy as np
from detection_faults import GROUPS, Noise

from rankscope.core.state import State
from rankscope.diagnose.diagnosis import Diagnosis
from rankscope.diagnose.evidence import Observation
from rankscope.diagnose.outliers import WorkerOutliers

Row = dict[str, Any]
WORKERS = (8, 64, 1024)
STEPS = 60
WARM_UP = 10


def measure() -> list[Row]:
    """Return a row for each number of workers: milliseconds a step, and bytes of the state."""
    return [_measure(workers) for workers in WORKERS]


def _measure(workers: int) -> Row:
    rng = np.random.default_rng(workers)
    outliers, diagnosis = WorkerOutliers(workers), Diagnosis(workers)
    seconds: dict[str, list[float]] = {"outliers": [], "diagnosis": []}
    for step in range(WARM_UP + STEPS):
        report = Noise.draw(rng, workers).to_report(step)
        start = time.perf_counter()
        list(outliers.observe(Observation(report)))
        between = time.perf_counter()
        diagnosis.observe(report)
        seconds["outliers"].append(between - start)
        seconds["diagnosis"].append(time.perf_counter() - between)
    times = {name: 1e3 * np.array(values[WARM_UP:]) for name, values in seconds.items()}
    return {
        "workers": workers,
        "groups": len(GROUPS),
        "steps": STEPS,
        **{f"{name}_median": float(np.median(values)) for name, values in times.items()},
        **{f"{name}_p90": float(np.quantile(values, 0.9)) for name, values in times.items()},
        "state_bytes": _num_bytes(outliers.state()),
    }


def _num_bytes(state: State | list[Any] | Any) -> int:
    """Return the bytes of all arrays in a state."""
    if isinstance(state, np.ndarray):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state
    return sum(map(_num_bytes, values)) if isinstance(state, dict | list | tuple) else 0
