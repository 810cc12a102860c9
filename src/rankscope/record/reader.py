"""Reading a run directory, finished or still being written."""

import math
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.bus.evidence import DType, Table
from rankscope.bus.finding import MAX_WORKERS, Finding
from rankscope.bus.parity import FOLDER
from rankscope.bus.step import StepReport
from rankscope.errors import RunError, UsageError
from rankscope.evidence import columns_of, find_column
from rankscope.files import is_directory, is_file, parse, read_file, unreadable
from rankscope.record.begin import (
    FINDINGS_FILE,
    INFO_FILE,
    SCHEMA_VERSION,
    is_run,
    writer_is_gone,
)
from rankscope.record.rollups import (
    MAX_ROWS,
    Cells,
    Coverage,
    Overview,
    is_sorted,
    read_coverage,
    read_overviews,
)
from rankscope.record.rows import read_reports
from rankscope.record.schema import FILL, row_keys, schema_with, to_numpy
from rankscope.record.stores import at_hand
from rankscope.record.tables import (
    Columns,
    even_rows,
    even_single_rows,
    latest_rows,
    num_rows,
    num_values,
    parts_in,
    read_pieces,
    read_rows,
    step_range,
    thinned_rows,
    to_columns,
)
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.direction import from_upper_triangle
from rankscope.stats.draws import DistinctSamples

MAX_STEPS = 2**21  # most steps that are read one by one; of more, an even choice


class Run:
    """A run directory. Open it with :meth:`open`; every call reads the present files.

    It raises a RunError for an unreadable file, a UsageError for an unknown table, and a KeyError
    for an unknown column.

    Attributes:
        path: The directory.
        info: The content of ``run.json`` when the run was opened.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self._findings: tuple[Finding, ...] | None = None
        self._seen: tuple[str, int] | None = None
        self._overviews: dict[str, Overview] = {}

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Return whether a path looks like a run directory: it holds a ``run.json``."""
        return is_run(Path(path))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run: the same as ``rankscope.load(path).run``.

        Args:
            path: Its directory, or its address in an object store.

        Raises:
            RunError: There is no such directory, it is not a run, its ``run.json`` is damaged, a
                newer rankscope wrote it, or the object store cannot be read.
        """
        path = at_hand(path)
        info = _read_info(path / INFO_FILE)
        version = info["schema_version"]
        if version > SCHEMA_VERSION:
            raise RunError(
                f"{path} was written by a newer rankscope (schema {version}; this one reads up to "
                f"{SCHEMA_VERSION}): upgrade with pip install -U rankscope"
            )
        return cls(path, info)

    @property
    def status(self) -> str:
        """``running`` until the run is closed; then how it ended.

        ``interrupted`` if its writer is known to have ended without closing it.
        """
        status = str(self.info.get("status", "running"))
        return "interrupted" if status == "running" and writer_is_gone(self.path) else status

    @property
    def version(self) -> str:
        """A value that changes with every flush and finding: names, sizes, times of three files.

        Cheap at any length of the run, to decide whether to read it again.

        Raises:
            RunError: The files of the steps cannot be listed.
        """
        last = parts_in(self.path / Table.STEPS)[-1:]  # each flush writes this table after the rest
        files = [self.path / INFO_FILE, self.path / FINDINGS_FILE, *last]
        return " ".join(map(_stamp, files))

    @property
    def is_long(self) -> bool:
        """Whether an assessment reads roll-ups and samples of this run, not every row."""
        found = step_range(self.path, Table.WORKERS)
        if found is None:
            return False
        cells = (found[1] - found[0] + 1) * self.num_workers
        return cells > MAX_ROWS or self.num_rows(Table.WORKERS) > MAX_ROWS

    @property
    def num_workers(self) -> int:
        """W from ``run.json``, otherwise from the recorded ranks."""
        for name in ("num_workers", "world_size"):
            if isinstance(self.info.get(name), int):
                return int(self.info[name])
        schema = schema_with(Table.WORKERS, ["rank"])
        pieces = (rows for file in self._files(Table.WORKERS) for rows in read_pieces(file, schema))
        return max((pc.max(rows["rank"]).as_py() + 1 for rows in pieces if len(rows)), default=0)

    def num_rows(self, table: Table) -> int:
        """Return the number of a table's rows, without reading them."""
        return num_rows(self._files(table))

    @property
    def num_samples(self) -> int:
        """Estimated number of recorded samples, from the first rows of each file."""
        return num_values(self._files(Table.SAMPLES), "samples")

    def table(self, table: Table | str) -> pa.Table:
        """Return one table, sorted by step, rank and micro-batch.

        A table without files is empty; columns that the files lack are null.
        """
        table = _table(table)
        return self._rows(table, _names(table))

    def columns(self, table: Table | str, *names: str) -> Columns:
        """Return columns of one table as numpy arrays ``[rows]``; all of them without names.

        A null is NaN in a float column, ``MISSING_INT`` in an integer one and False in a boolean
        one. A column of lists is an object array of numpy arrays.
        """
        table = _table(table)
        names = names or _names(table)
        return to_columns(table, self._rows(table, names), names)

    def steps(self, *names: str) -> Columns:
        """Return columns of the steps table, as :meth:`columns` does.

        Of more than two million steps, every n-th.
        """
        if self.num_rows(Table.STEPS) <= MAX_STEPS:
            return self.columns(Table.STEPS, *names)
        schema = schema_with(Table.STEPS, ("step", *names))
        rows = thinned_rows(self._files(Table.STEPS), schema, MAX_STEPS)
        return to_columns(Table.STEPS, rows, names)

    def per_worker(self, name: str) -> tuple[Ints, Floats]:
        """Return a column of the workers table as a matrix.

        Returns:
            The steps ``[T]`` that have rows, and the values ``[T, W]``: NaN where a worker has no
            row or no value.
        """
        find_column(Table.WORKERS, name)
        rows = self._rows(Table.WORKERS, ("step", "rank", name))
        cells = self._cells(rows)
        values = to_numpy(rows[name].cast(pa.float64(), safe=False), DType.FLOAT)
        return cells.steps_B, cells.spread(values, np.float64("nan"))

    def matrix(self, name: str) -> NDArray[Any]:
        """Return a column of the workers table ``[T, W]``, as :meth:`columns` does.

        Where a worker has no row in a step, it is as where it has no value.
        """
        dtype = find_column(Table.WORKERS, name).dtype
        rows = self._rows(Table.WORKERS, ("step", "rank", name))
        values = to_numpy(rows[name], dtype)
        return self._cells(rows).spread(values, values.dtype.type(FILL[dtype]))

    def _cells(self, rows: pa.Table) -> Cells:
        steps, ranks = (to_numpy(rows[name], DType.INT) for name in ("step", "rank"))
        return Cells(steps, ranks, self.num_workers)

    def overview(self, name: str, *, max_bins: int = 240) -> Overview:
        """Return a column of the workers table over the whole run, in few bins of steps.

        A run of more than two million rows is read from its roll-ups, in bins of at least 64
        steps; without roll-ups it takes as long as reading the whole column does.

        Args:
            name: The column, of numbers.
            max_bins: Bins at most; a run of so few steps has a bin for each.
        """
        return self.overviews(name, max_bins=max_bins)[name]

    def overviews(self, *names: str, max_bins: int = 240) -> dict[str, Overview]:
        """Return several columns as :meth:`overview` does, reading each file once.

        Results are cached until there are new steps: their arrays are shared.
        """
        for name in names:
            find_column(Table.WORKERS, name)
        seen = (self.version, max_bins)
        known = self._overviews if self._seen == seen else {}
        missing = [name for name in dict.fromkeys(names) if name not in known]
        if missing:
            known = known | read_overviews(self.path, missing, self.num_workers, max_bins)
            self._seen = seen
            self._overviews = known
        return {name: known[name] for name in names}

    def sampled(self, table: Table | str, *names: str, max_rows: int) -> Columns:
        """Return columns of an even choice of a table's steps, as :meth:`columns` does.

        Args:
            table: The table.
            names: The columns; at least one.
            max_rows: About how many rows at most; all rows when there are no more.
        """
        table = _table(table)
        schema = schema_with(table, ("step", *names))
        return to_columns(table, even_rows(self._files(table), schema, max_rows), names)

    def latest(self, table: Table | str, *names: str, max_rows: int = 2**17) -> Columns:
        """Return columns of the last steps of a table, as :meth:`columns` does.

        The map of groups and workers is made from them: with W workers and G groups, a step has
        W·G rows in ``groups``.

        Args:
            table: The table.
            names: The columns; all without.
            max_rows: Rows at most; the last flush is always included.
        """
        table = _table(table)
        names = names or _names(table)
        schema = schema_with(table, names)
        return to_columns(table, latest_rows(self._files(table), schema, max_rows), names)

    def cosines(self, max_frames: int | None = None) -> tuple[Ints, Floats]:
        """Return the recorded cosines of all pairs of workers.

        Args:
            max_frames: Steps at most, evenly chosen from the first to the last; only the parts of
                the files that hold them are read. All steps if omitted.

        Returns:
            The observed steps ``[T]``, and symmetric matrices ``[T, W, W]`` whose diagonal is 1,
            or NaN for a worker that has no cosine with any other in that step.
        """
        names = ("step", "cosines")
        if max_frames is None:
            rows = self.columns(Table.PAIRS, *names)
        else:
            files = self._files(Table.PAIRS)
            schema = schema_with(Table.PAIRS, names)
            rows = to_columns(Table.PAIRS, even_single_rows(files, schema, max_frames), names)
        num_pairs = max(map(len, rows["cosines"]), default=0)
        width = (1 + math.isqrt(1 + 8 * num_pairs)) // 2 if num_pairs else self.num_workers
        try:
            matrices = [from_upper_triangle(values, width) for values in rows["cosines"]]
        except ValueError as error:
            raise RunError(f"the cosines of {self.path} are damaged ({error})") from error
        return rows["step"], np.array(matrices, np.float64).reshape(-1, width, width)

    def coverage(self) -> Coverage:
        """Return the number of different samples over the run.

        They come from the roll-ups; in a run of few steps, which has none, from the samples. Arrays
        are empty where samples are unknown.
        """
        return read_coverage(self.path) or self.count_samples()

    def count_samples(self) -> Coverage:
        """Return the same from the samples themselves, in pieces: for many, without roll-ups."""
        counted = DistinctSamples()
        schema = schema_with(Table.SAMPLES, ["step", "samples"])
        moments = []
        for file in self._files(Table.SAMPLES):
            for rows in read_pieces(file, schema):
                counted.add(pc.list_flatten(rows["samples"]).to_numpy())
                if counted.drawn:
                    step = pc.max(rows["step"]).as_py()
                    moments.append((step, counted.drawn, counted.distinct()))
        step_B, drawn_B, distinct_B = np.array(moments, np.int64).reshape(-1, 3).T
        return Coverage(step_B, drawn_B, distinct_B, counted.is_exact)

    def sample_ids(self) -> Ints:
        """Return all samples that were drawn, in any order: ids, or digests of their content."""
        schema = schema_with(Table.SAMPLES, ["samples"])
        rows = read_rows(self.path / Table.SAMPLES, schema)
        cells = [chunk.flatten() for chunk in rows["samples"].chunks]
        return np.concatenate([np.empty(0, np.int64), *(cell.to_numpy() for cell in cells)])

    def _files(self, table: Table) -> list[Path]:
        return parts_in(self.path / table)

    def _rows(self, table: Table, names: Sequence[str]) -> pa.Table:
        """Return columns of a table, sorted by its keys, which may come along."""
        keys = row_keys(table)
        schema = schema_with(table, (*keys, *names))
        rows = read_rows(self.path / table, schema)
        if is_sorted([to_numpy(rows[key], DType.INT) for key in keys]):
            return rows
        return rows.sort_by([(key, "ascending") for key in keys])

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, the last event of each id, in order of first appearance.

        An incomplete last line is ignored.

        Raises:
            RunError: Another line is malformed.
        """
        if self._findings is not None:
            return self._findings
        file = self.path / FINDINGS_FILE
        try:
            content = read_file(file)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise unreadable(file, error) from error
        latest: dict[str, Finding] = {}
        for number, line in enumerate(BytesIO(content), start=1):
            try:
                finding = Finding.from_json(parse(line))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                if not line.endswith(b"\n"):  # the last one, torn
                    break
                raise RunError(
                    f"{file}, line {number} is not a finding: repair the line or remove it"
                ) from error
            latest[finding.id] = finding
        return tuple(latest.values())

    def with_findings(self, findings: Iterable[Finding]) -> "Run":
        """Return this run with other findings than those in ``findings.jsonl``."""
        run = Run(self.path, self.info)
        run._findings = tuple(findings)
        return run

    def iter_reports(self, first_step: int = 0) -> Iterator[StepReport]:
        """Yield the recorded steps as the live detectors saw them, bit for bit.

        Values without a table (sketches, inner products) are missing, see
        :func:`rankscope.bus.step.as_recorded`. About one file of each table is in memory at a
        time. Steps written meanwhile are left out.

        Args:
            first_step: The first step to yield.

        Raises:
            RunError: A file cannot be read, or a step has no workers.
        """
        return read_reports(self.path, first_step)


def _stamp(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError:
        return "-"
    return f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"


def _table(name: Table | str) -> Table:
    try:
        return Table(name)
    except ValueError:
        raise UsageError(f"expected one of the tables {', '.join(Table)}, got {name!r}") from None


def _names(table: Table) -> tuple[str, ...]:
    return tuple(s.name for s in columns_of(table))


def no_run(directory: Path) -> str:
    """Return why a directory that exists is no run."""
    if is_directory(directory / FOLDER):
        return (
            f"{directory} holds a record for rankscope parity, and no run: compare it by rankscope "
            f'parity -a {directory} -b "COMMAND"'
        )
    return f"{directory} is not a run directory: it has no run.json; check the path"


def _read_info(file: Path) -> dict[str, Any]:
    try:
        info = parse(read_file(file))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if is_file(file.parent):
            raise RunError(
                f"{file.parent} is a file: name the directory of a run, run_dir in watch()"
            ) from error
        if not is_directory(file.parent):
            raise RunError(f"there is no run directory {file.parent}: check the path") from error
        raise RunError(no_run(file.parent)) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise RunError(f"{file} cannot be read as JSON ({error}): the run is damaged") from error
    if not isinstance(info, dict) or not isinstance(info.get("schema_version"), int):
        raise RunError(f"{file} states no schema_version: it is not the run.json of a run")
    for name in ("num_workers", "world_size"):
        width = info.get(name)
        if width is None:
            continue
        if not isinstance(width, int) or not 0 <= width <= MAX_WORKERS:
            raise RunError(
                f"{file} expected up to {MAX_WORKERS} as {name}, got {width!r:.40}: the run is "
                "damaged"
            )
    return info
