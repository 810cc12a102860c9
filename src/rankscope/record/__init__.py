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
    digests/*.parquet   what differs between workers that should hold the same; else nothing
    rollups/*/*.parquet a row per worker for every 64 steps, and for every 512: means, extremes
    replay/*/           the batches of a finding, to be run again
    findings.jsonl      events, one per line; the last one of an id wins
    detectors.npz       what the detectors remember, for a restarted job
    detectors-start.npz what they remembered when the run began, if it continues another
"""

from rankscope.record.files import RunTakenError
from rankscope.record.overview import Overview
from rankscope.record.reader import Run
from rankscope.record.rollups import Coverage
from rankscope.record.schema import SCHEMA_VERSION, arrow_schema
from rankscope.record.tables import Columns
from rankscope.record.writer import RunWriter

__all__ = [
    "SCHEMA_VERSION",
    "Columns",
    "Coverage",
    "Overview",
    "Run",
    "RunTakenError",
    "RunWriter",
    "arrow_schema",
]
