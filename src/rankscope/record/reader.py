"""Reading a run directory, finished or still being written."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from rankscope.core.arrays import Floats, Ints
from rankscope.core.direction import from_upper_triangle
from rankscope.core.finding import Finding
from rankscope.core.signals import DType, Table, signal, signals
from rankscope.core.step import StepReport
from rankscope.errors import RunError
from rankscope.record.replay import read_reports
from rankscope.record.schema import SCHEMA_VERSION, arrow_schema, row_keys, to_numpy
from rankscope.record.tables import Columns, parts_of, read_part


class Run:
    """A run directory. Open it with :meth:`open`; every call reads the files as they are then.

    Attributes:
        path: The directory.
        info: What ``run.json`` said when the run was opened.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Return whether a path looks like a run directory: it holds a ``run.json``."""
        return (Path(path) / "run.json").is_file()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run directory.

        Raises:
            RunError: There is no such directory, it is not a run, its ``run.json`` is damaged, or
                a newer rankscope wrote it.
        """
        path = Path(path)
        if not path.is_dir():
            raise RunError(f"there is no run directory {path}: check the path")
        if not cls.is_run(path):
            raise RunError(f"{path} is not a run directory: it has no run.json; check the path")
        info = _read_info(path / "run.json")
        version = info["schema_version"]
        if version > SCHEMA_VERSION:
            raise RunError(
                f"{path} was written by a newer rankscope (schema {version}; this one reads up to "
                f"{SCHEMA_VERSION}): upgrade with pip install -U rankscope"
            )
        return cls(path, info)

    @property
    def status(self) -> str:
        """``running`` until the run is closed, also after it was killed; then how it ended."""
        return str(self.info.get("status", "running"))

    @property
    def num_workers(self) -> int:
        """W, as ``run.json`` states it, otherwise as the recorded ranks show it."""
        for name in ("num_workers", "world_size"):
            if isinstance(self.info.get(name), int):
                return int(self.info[name])
        ranks = self.columns(Table.WORKERS, "rank")["rank"]
        return int(ranks.max()) + 1 if len(ranks) else 0

    def table(self, table: Table) -> pa.Table:
        """Return one table, sorted by step, rank and micro-batch.

        A table without files is empty; columns that the files lack are null.

        Raises:
            RunError: A file cannot be read.
        """
        schema = arrow_schema(table)
        parts = [read_part(file, schema) for file in parts_of(self.path, table)]
        rows = pa.concat_tables([schema.empty_table(), *parts])
        return rows.sort_by([(key, "ascending") for key in row_keys(table)])

    def columns(self, table: Table, *names: str) -> Columns:
        """Return columns of one table as numpy arrays ``[rows]``; all of them without names.

        A null is NaN in a float column, ``MISSING_INT`` in an integer one and False in a boolean
        one. A column of lists is an object array of numpy arrays.

        Raises:
            KeyError: There is no such column.
            RunError: A file cannot be read.
        """
        dtypes = {name: signal(table, name).dtype for name in names or _names(table)}
        rows = self.table(table)
        return {name: to_numpy(rows[name], dtype) for name, dtype in dtypes.items()}

    def per_worker(self, name: str) -> tuple[Ints, Floats]:
        """Return a column of the workers table as a matrix.

        Returns:
            The steps ``[T]`` that have rows, and the values ``[T, W]``: NaN where a worker has no
            row or no value.

        Raises:
            KeyError: There is no such column.
            RunError: A file cannot be read.
        """
        signal(Table.WORKERS, name)
        rows = self.table(Table.WORKERS)
        steps_T, at = np.unique(to_numpy(rows["step"], DType.INT), return_inverse=True)
        ranks = to_numpy(rows["rank"], DType.INT)
        width = max(self.num_workers, int(ranks.max(initial=-1)) + 1)
        values_TW = np.full((len(steps_T), width), np.nan)
        values_TW[at, ranks] = to_numpy(rows[name].cast(pa.float64(), safe=False), DType.FLOAT)
        return steps_T, values_TW

    def cosines(self) -> tuple[Ints, Floats]:
        """Return the recorded cosines of all pairs of workers.

        Returns:
            The observed steps ``[T]``, and symmetric matrices ``[T, W, W]`` whose diagonal is 1,
            or NaN for a worker that has no cosine with any other in that step.

        Raises:
            RunError: A file cannot be read.
        """
        rows = self.columns(Table.PAIRS, "step", "cosines")
        num_pairs = max(map(len, rows["cosines"]), default=0)
        width = (1 + math.isqrt(1 + 8 * num_pairs)) // 2 if num_pairs else self.num_workers
        matrices = [from_upper_triangle(values, width) for values in rows["cosines"]]
        return rows["step"], np.array(matrices, np.float64).reshape(-1, width, width)

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, the last event of each id, in order of first appearance.

        A last line that a kill cut short is ignored.

        Raises:
            RunError: Another line is malformed.
        """
        file = self.path / "findings.jsonl"
        try:
            lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
        except OSError as error:
            raise RunError(f"cannot read {file} ({error.strerror}): check permissions") from error
        latest: dict[str, Finding] = {}
        for number, line in enumerate(lines, start=1):
            try:
                finding = Finding.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):  # empty after a last newline, or torn
                    break
                raise RunError(
                    f"{file}, line {number} is not a finding: repair the line or remove it"
                ) from error
            latest[finding.id] = finding
        return tuple(latest.values())

    def with_findings(self, findings: Iterable[Finding]) -> "Run":
        """Return this run with other findings than those in ``findings.jsonl``."""
        return _Rediagnosed(self.path, self.info, tuple(findings))

    def iter_reports(self, first_step: int = 0) -> Iterator[StepReport]:
        """Yield the recorded steps as detectors saw them live: every number has the same bits.

        What no table holds (sketches, inner products) is missing in them, see
        :func:`rankscope.core.recorded.as_recorded`. Holds about one file of each table in memory
        at a time. Steps that are written meanwhile are left out.

        Args:
            first_step: The first step to yield.

        Raises:
            RunError: A file cannot be read, or a step has no workers.
        """
        return read_reports(self.path, first_step)


class _Rediagnosed(Run):
    """A run whose findings are not read from its directory."""

    def __init__(self, path: Path, info: dict[str, Any], findings: tuple[Finding, ...]) -> None:
        super().__init__(path, info)
        self._findings = findings

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings that were given."""
        return self._findings


def _names(table: Table) -> tuple[str, ...]:
    return tuple(s.name for s in signals(table))


def _read_info(file: Path) -> dict[str, Any]:
    try:
        info = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read as JSON ({error}): the run is damaged") from error
    if not isinstance(info, dict) or not isinstance(info.get("schema_version"), int):
        raise RunError(f"{file} states no schema_version: it is not the run.json of a run")
    return info
