"""How the rows of many gradients are shared out among the programs of a device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankscope.gradients.kernels.interface import PERIOD, Piece

ALIGNED = 4  # elements in an aligned vector

_TILE = 1024  # columns
_PROGRAMS_PER_PROCESSOR = 8
_FEWEST_ROWS = 16  # of a job, where there are more
_FEWEST_UNITS = 4  # of rows that are read without a mask

Segment = tuple[int, ...]
"""A row of the kernel's table: see ``measure_tiles``."""


class Grid:
    """How rows of a width are cut into tiles, and among how many jobs they are shared out.

    Args:
        width: Elements in a row.
        num_processors: Of the device.
    """

    def __init__(self, width: int, num_processors: int) -> None:
        reach = width + ALIGNED - 1  # columns are shifted by up to three
        self.width = width
        self.tile = min(_TILE, max(128, 1 << (reach - 1).bit_length()))
        self.tiles = -(-reach // self.tile)
        self.num_jobs = max(ALIGNED, num_processors * _PROGRAMS_PER_PROCESSOR // self.tiles)

    @property
    def reach(self) -> int:
        """Columns in all tiles."""
        return self.tiles * self.tile


@dataclass(frozen=True, slots=True)
class JobTables:
    """The kernels' tables of gradients.

    Attributes:
        segments: Rows of the table ``[S, FIELDS]``, int64.
        jobs: The first segment of each job, and S; int64 ``[J + 1]``.
        jobs_of: The first job of each row of the totals, and J; int64 ``[R + 1]``.
        row_signs: Of all pieces, float32.
    """

    segments: Tensor
    jobs: Tensor
    jobs_of: Tensor
    row_signs: Tensor

    @property
    def num_jobs(self) -> int:
        """J."""
        return len(self.jobs) - 1

    @property
    def num_rows(self) -> int:
        """R, the number of rows up to the last that has a job."""
        return len(self.jobs_of) - 1

    def to(self, device: torch.device) -> "JobTables":
        """Return them on a device."""
        named = ("segments", "jobs", "jobs_of", "row_signs")
        return replace(self, **{name: getattr(self, name).to(device) for name in named})


def share_out(
    pieces: Sequence[Piece], grid: Grid, rows_at_once: int, *, sketching: bool
) -> JobTables:
    """Share pieces out among jobs of nearly equal sizes, each in one row of the totals.

    Args:
        pieces: Of gradients of one type, at least one.
        grid: How rows are cut.
        rows_at_once: Rows that the kernel reads without a mask, at once.
        sketching: Whether the sketch is wanted, or norms alone.
    """
    placed = [_Placed(piece, grid.width) for piece in pieces]
    stride = ALIGNED if sketching else 1
    unit = stride * rows_at_once
    rows = sum(p.num_rows for p in placed)
    per_job = max(_FEWEST_ROWS, -(-rows // grid.num_jobs))
    if per_job < _FEWEST_UNITS * unit:  # half as many jobs, with twice as many rows
        per_job = max(_FEWEST_ROWS, -(-rows // max(1, grid.num_jobs // 2)))
    segments: list[Segment] = []
    jobs = [0]
    jobs_of = [0]
    row_signs = []
    first_signs = _first_signs(placed)
    for row in range(1 + max(piece.row for piece in pieces)):
        here = [p for p in placed if p.piece.row == row]
        for shares in _jobs(here, per_job, unit):
            for part, first, stop in shares:
                many = stop - first >= stride * rows_at_once
                lanes = stride if many else 1
                segments += [
                    part.segment(first_signs[id(part)], lane, lanes, stop, in_order=not many)
                    for lane in range(first, first + lanes)
                ]
            jobs.append(len(segments))
        jobs_of.append(len(jobs) - 1)
    row_signs = [p.row_signs for p in placed if p.piece.signs is not None]
    return JobTables(
        torch.tensor(segments, dtype=torch.int64, device="cpu"),
        torch.tensor(jobs, dtype=torch.int64, device="cpu"),
        torch.tensor(jobs_of, dtype=torch.int64, device="cpu"),
        torch.cat(row_signs) if row_signs else torch.zeros(1, dtype=torch.float32, device="cpu"),
    )


class _Placed:
    """A piece, and where its rows lie in the parameter."""

    def __init__(self, piece: Piece, width: int) -> None:
        self.piece = piece
        self.first_row, self.first_column = divmod(piece.start, width)
        self.num_rows = (self.first_column + piece.count - 1) // width + 1
        shift = 0 if piece.signs is None else piece.signs.shift
        self._phase = (piece.start - self.first_column + shift) % PERIOD

    @property
    def row_signs(self) -> Tensor:
        assert self.piece.signs is not None
        stop = self.first_row + self.num_rows
        return self.piece.signs.rows(stop)[self.first_row : stop]

    def segment(
        self, first_sign: int, first: int, stride: int, stop: int, *, in_order: bool
    ) -> Segment:
        """Return every ``stride``-th row from ``first`` on, below ``stop``."""
        piece = self.piece
        offset = piece.offset * piece.dtype.itemsize
        turns = -(-(stop - first) // stride)
        return (
            piece.source, offset, piece.count, self.first_column, first_sign, self._phase,
            first, stride, turns, int(in_order),
        )  # fmt: skip


def _first_signs(placed: Sequence[_Placed]) -> dict[int, int]:
    """Return where the row signs of each piece begin, if pieces have signs: all have, or none."""
    firsts = {}
    first = 0
    for part in placed:
        firsts[id(part)] = first
        first += part.num_rows
    return firsts


def _jobs(
    placed: Sequence[_Placed], most_rows: int, unit: int
) -> Iterator[list[tuple[_Placed, int, int]]]:
    """Yield jobs of about so many rows: pieces, with the first of their rows and the end.

    Where there are many rows, those of a job are a multiple of the rows that are read without a
    mask: the rest of a job's would be read one by one.
    """
    rows = sum(part.num_rows for part in placed)
    size = -(-rows // max(1, -(-rows // most_rows)))
    if 2 * size > unit:
        size = -(-size // unit) * unit
    job = []
    room = size
    for part in placed:
        first = 0
        while first < part.num_rows:
            stop = min(part.num_rows, first + room)
            job.append((part, first, stop))
            room -= stop - first
            first = stop
            if not room:
                yield job
                job = []
                room = size
    if job:
        yield job
