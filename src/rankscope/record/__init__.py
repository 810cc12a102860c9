"""A run on disk: Parquet tables and JSON that any tool can read, also while they are written.

::

    run.json            schema version, versions, configuration, status
    steps/*.parquet     one row per step: the last table of a step to be written, so a step that is
                        here has all its rows in the other tables
    workers/*.parquet   one row per step and worker
    micro/*.parquet     one row per micro-batch, in steps with accumulation
    samples/*.parquet   the samples of each worker's batch, where they are known
    pairs/*.parquet     cosines of all pairs of workers, for up to 64 workers
    groups/*.parquet    one row per observed step, worker and group of parameters
    digests/*.parquet   differences between workers whose state should be equal
    rollups/*/*.parquet a row per worker for every 64 steps, and for every 512: means, extremes
    replay/*/           the batches of a finding, to be run again
    findings.jsonl      events, one per line; the last one of an id wins
    detectors.npz       the state of the detectors, for a restarted job
    detectors-start.npz their state when the run began, if it continues another
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.record.reader import Run as Run
    from rankscope.record.rollups import Coverage as Coverage
    from rankscope.record.rollups import Overview as Overview
    from rankscope.record.tables import Columns as Columns
    from rankscope.record.writer import RunWriter as RunWriter

_HOMES = {
    "Columns": "tables",
    "Coverage": "rollups",
    "Overview": "rollups",
    "Run": "reader",
    "RunWriter": "writer",
}
"""Imported on first use: a training process begins a run without Arrow."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"rankscope.record.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rankscope.record' has no attribute {name!r}")
