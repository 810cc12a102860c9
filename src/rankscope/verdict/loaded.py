"""A recorded run in Python and in notebooks: its tables, its findings and its verdict."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope.bus.evidence import Table
from rankscope.evidence import columns_of
from rankscope.record import Run
from rankscope.verdict.assessment import Assessment, assess
from rankscope.verdict.words import SIGNS, VerdictWords, verdict_of

_FINDINGS = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "status", "cause", "severity")),
        *((name, pa.int64()) for name in ("step", "first_step", "last_step")),
        ("ranks", pa.list_(pa.int64())),
        ("groups", pa.list_(pa.string())),
        *((name, pa.string()) for name in ("explanation", "next_check", "evidence")),
    ]
)
_COLOURS = {
    "healthy": "#2e7d32",
    "early": "#00838f",
    "note": "#1565c0",
    "warning": "#b26a00",
    "error": "#c62828",
}
_CELL = '<td style="text-align:left;padding:2px 12px 2px 0">'


def load(path: str | Path) -> "LoadedRun":
    """Open a recorded run, finished or still being written.

    What it returns gives Arrow tables and the verdict. Its attribute ``run`` is a
    :class:`rankscope.Run`, for numpy arrays and for runs of any length.

    Args:
        path: Its directory, or its address in an object store, such as ``s3://bucket/runs/sft``.

    Returns:
        The run: ``load(path).workers.to_pandas()`` has a row for each step and worker.

    Raises:
        RunError: There is no such directory, it is not a run, its ``run.json`` is damaged, a
            newer rankscope wrote it, or the object store cannot be read.
    """
    return LoadedRun(Run.open(path))


class LoadedRun:
    """A run's tables as Arrow tables, which pandas and Polars take as they are.

    Every attribute reads the files as they are then. A notebook shows the verdict.

    Args:
        run: The run.

    Attributes:
        run: The same run for numpy arrays, see :class:`rankscope.Run`.
        path: Its directory.
        info: The content of ``run.json``: versions, options, configuration.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.path
        self.info = run.info

    @property
    def steps(self) -> pa.Table:
        """A row for each step."""
        return self.run.table(Table.STEPS)

    @property
    def workers(self) -> pa.Table:
        """A row for each step and worker.

        A column that is a sum of flags, such as ``rng_used``, has one with their names beside it,
        such as ``rng_used_in_words``.
        """
        rows = self.run.table(Table.WORKERS)
        for column in (column for column in columns_of(Table.WORKERS) if column.bits):
            values = rows[column.name].to_pylist()
            names = [None if value is None else column.bit_names(value) for value in values]
            place = rows.column_names.index(column.name) + 1
            rows = rows.add_column(
                place, "_".join((column.name, "in_words")), pa.array(names, pa.string())
            )
        return rows

    @property
    def micro(self) -> pa.Table:
        """A row for each micro-batch of steps with accumulation."""
        return self.run.table(Table.MICRO)

    @property
    def groups(self) -> pa.Table:
        """A row for each measured step, worker and group of parameters."""
        return self.run.table(Table.GROUPS)

    @property
    def samples(self) -> pa.Table:
        """The samples of each worker's batch, where they are known."""
        return self.run.table(Table.SAMPLES)

    @property
    def pairs(self) -> pa.Table:
        """Cosines of all pairs of workers, for up to 64 workers."""
        return self.run.table(Table.PAIRS)

    @property
    def traces(self) -> pa.Table:
        """Digests and sketches of the tensors of rank 0, where the run was traced."""
        return self.run.table(Table.TRACES)

    @property
    def digests(self) -> pa.Table:
        """Differences between workers whose state should be equal."""
        return self.run.table(Table.DIGESTS)

    @property
    def findings(self) -> pa.Table:
        """A row for each finding in its last state; ``evidence`` is a JSON object."""
        events = [finding.to_json() for finding in self.run.findings()]
        rows = [{**event, "evidence": json.dumps(event["evidence"])} for event in events]
        return pa.Table.from_pylist(rows, schema=_FINDINGS)

    def assess(self) -> Assessment:
        """Return the verdict: headline, what to do, statements and the numbers behind them.

        Raises:
            RunError: A file of the run cannot be read.
        """
        return assess(self.run)

    def __repr__(self) -> str:
        verdict = self._verdict()
        return f"<rankscope run {verdict.title}: {verdict.assessment.headline}>"

    def _repr_html_(self) -> str:
        verdict = self._verdict()
        assessment = verdict.assessment
        colour = _COLOURS[verdict.severity]
        rows = "".join(map(_row, verdict.findings))
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 14px;max-width:60em">'
            f'<b style="color:{colour}">{SIGNS[verdict.severity]} {verdict.severity}</b> '
            f"{escape(verdict.title)} · {escape(verdict.line)}<br>"
            f"<b>{escape(assessment.headline)}</b><br>"
            f"What to do: {escape(assessment.recommendation)}"
            f"<table>{rows}</table></div>"
        )

    def _verdict(self) -> VerdictWords:
        return verdict_of(self.run, self.assess())


def _row(finding: Mapping[str, Any]) -> str:
    cells = (finding["severity"], finding["title"], finding["ranks"], finding["steps"])
    return f"<tr>{''.join(f'{_CELL}{escape(cell)}</td>' for cell in cells)}</tr>"
