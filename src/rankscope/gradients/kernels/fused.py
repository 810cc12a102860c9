"""Runs the Triton kernels that measure gradients and gather the results, on CUDA.

The rows of many gradients are shared out among the programs of the device.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.bus.gradient_part import NUMBERS
from rankscope.gradients.kernels import triton as kernels
from rankscope.gradients.kernels.interface import PERIOD, Kernel, Piece, Prepared, extend
from rankscope.gradients.kernels.launch import launcher
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.kernels.triton import ALIGNED
from rankscope.gradients.totals import Folding, GradientTotals, fold_signs

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_NORM_WIDTH = 4096  # a multiple of the tile: the norm alone needs no row of the sketch's width
_MOST_ALONE = 1024
_COMBINING = {"num_warps": 4, "enable_fp_fusion": True}
_ROWS_COMBINED = 16
_TILE = 1024  # columns
_PROGRAMS_PER_PROCESSOR = 8
_FEWEST_ROWS = 16  # of a job, where there are more
_FEWEST_UNITS = 4  # of rows that are read without a mask

_SHAPES = {(4, True): (4, 4), (4, False): (4, 4), (2, True): (8, 8), (2, False): (16, 8)}
"""Rows that are read at once, and warps, by an element's bytes and whether it is sketched.

The fastest on an H200 of those tried.
"""

Segment = tuple[int, ...]
"""A row of the kernel's table: see ``measure_tiles``."""


class Grid:
    """How rows of a width are cut into tiles, and among how many jobs they are shared out."""

    def __init__(self, width: int, num_processors: int) -> None:
        reach = width + ALIGNED - 1  # columns are shifted by up to three
        self.width = width
        self.tile = min(_TILE, max(128, 1 << (reach - 1).bit_length()))
        self.tiles = -(-reach // self.tile)
        self.num_jobs = max(ALIGNED, num_processors * _PROGRAMS_PER_PROCESSOR // self.tiles)


class JobTables(NamedTuple):
    """The kernels' tables of gradients."""

    segments: Tensor  # rows of the table ``[S, FIELDS]``, int64
    jobs: Tensor  # the first segment of each job, and S; int64 ``[J + 1]``
    jobs_of: Tensor  # the first job of each row of the totals, and J; int64 ``[R + 1]``
    row_signs: Tensor  # of all pieces, float32


def share_out(
    pieces: Sequence[Piece], grid: Grid, rows_at_once: int, *, sketching: bool
) -> JobTables:
    """Share pieces of gradients of one type out among jobs of nearly equal sizes, each in one row.

    The kernel reads ``rows_at_once`` rows without a mask at once.
    """
    placed: list[_Placed] = []
    rows = 0
    for piece in pieces:
        placed.append(_Placed(piece, grid.width, rows))
        rows += placed[-1].num_rows
    stride = ALIGNED if sketching else 1
    unit = stride * rows_at_once
    per_job = max(_FEWEST_ROWS, -(-rows // grid.num_jobs))
    if per_job < _FEWEST_UNITS * unit:  # half as many jobs, with twice as many rows
        per_job = max(_FEWEST_ROWS, -(-rows // max(1, grid.num_jobs // 2)))
    segments: list[Segment] = []
    jobs = [0]
    jobs_of = [0]
    for row in range(1 + max(piece.row for piece in pieces)):
        here = [p for p in placed if p.piece.row == row]
        for shares in _jobs(here, per_job, unit):
            for part, first, stop in shares:
                many = stop - first >= stride * rows_at_once
                lanes = stride if many else 1
                segments += [
                    part.segment(lane, lanes, stop, in_order=not many)
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

    def __init__(self, piece: Piece, width: int, first_sign: int) -> None:
        self.piece = piece
        self._first_sign = first_sign  # if pieces have signs: all have, or none
        self.first_row, self.first_column = divmod(piece.start, width)
        self.num_rows = (self.first_column + piece.count - 1) // width + 1
        shift = 0 if piece.signs is None else piece.signs.shift
        self._phase = (piece.start - self.first_column + shift) % PERIOD

    @property
    def row_signs(self) -> Tensor:
        assert self.piece.signs is not None
        stop = self.first_row + self.num_rows
        return self.piece.signs.rows(stop)[self.first_row : stop]

    def segment(self, first: int, stride: int, stop: int, *, in_order: bool) -> Segment:
        """Return every ``stride``-th row from ``first`` on, below ``stop``."""
        piece = self.piece
        offset = piece.offset * piece.dtype.itemsize
        turns = -(-(stop - first) // stride)
        return (
            piece.source, offset, piece.count, self.first_column, self._first_sign, self._phase,
            first, stride, turns, int(in_order),
        )  # fmt: skip


def _jobs(
    placed: Sequence[_Placed], most_rows: int, unit: int
) -> Iterator[list[tuple[_Placed, int, int]]]:
    """Yield jobs of about so many rows: pieces, with the first of their rows and the end.

    Those of many rows are multiples of the rows read without a mask, which are faster.
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


class TritonKernel(Kernel):
    """Reads gradients once, with as many programs as the device runs at the same time.

    Parts of other types than float32, bfloat16 and float16 go to plain torch.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        width: int,
        period: Tensor,
        *,
        num_processors: int | None = None,
    ) -> None:
        if num_processors is None:
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.device = device
        self.width = width
        self._plain = PlainKernel(device, width, period)
        self._sketch_grid = Grid(width, num_processors)
        self._norm_grid = Grid(_NORM_WIDTH, num_processors)
        self.period = _shifted_copies(period, self._sketch_grid).to(device)
        self._floats = torch.empty(0, device=device, dtype=torch.float32)
        self._numbers: tuple[Tensor, ...] = (self._floats,) * 3
        self._alone: dict[tuple[Piece, bool], TritonPieces] = {}

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> Prepared:
        """Prepare to measure several gradients with two launches for each type of element."""
        if pieces[0].dtype not in _TYPES:
            return self._plain.prepare(pieces, sketching=sketching)
        grid = self._sketch_grid if sketching else self._norm_grid
        if len(pieces) > 1:
            return TritonPieces(self, pieces, grid)
        prepared = self._alone.get((pieces[0], sketching))
        if prepared is None:
            if len(self._alone) >= _MOST_ALONE:
                self._alone.clear()
            prepared = self._alone[pieces[0], sketching] = TritonPieces(self, pieces, grid)
        return prepared

    def scratch(self, num_programs: int, tile: int) -> tuple[Tensor, ...]:
        """Return memory for the results of programs: sketches, norms, largest and non-finite."""
        floats = num_programs * (tile + ALIGNED)
        if floats > len(self._floats):
            self._floats = self._floats.new_empty(floats)
        if num_programs > len(self._numbers[0]):
            self._numbers = tuple(
                torch.empty(num_programs, device=self.device, dtype=dtype)
                for dtype in (torch.float64, torch.float32, torch.int64)
            )
        return self._floats, *self._numbers


class TritonPieces:
    """Adds several gradients to totals with two launches for each type of element."""

    def __init__(self, kernel: TritonKernel, pieces: Sequence[Piece], grid: Grid) -> None:
        self._kernel = kernel
        self._grid = grid
        self._sketching = grid.width == kernel.width
        self._pointers: Sequence[int] = []
        num_gradients = 1 + max(piece.source for piece in pieces)
        self._addresses = torch.empty(num_gradients, device=kernel.device, dtype=torch.int64)
        self._types = []
        for dtype in dict.fromkeys(piece.dtype for piece in pieces):
            alike = [piece for piece in pieces if piece.dtype == dtype]
            rows, _ = _SHAPES[dtype.itemsize, self._sketching]
            tables = share_out(alike, grid, rows, sketching=self._sketching)
            tables = JobTables(*(table.to(kernel.device) for table in tables))
            self._types.append((dtype, tables))

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals; see :class:`~rankscope.gradients.kernels.interface.Prepared`."""
        if pointers != self._pointers:
            addresses = torch.tensor(pointers, dtype=torch.int64, device="cpu")
            if self._addresses.is_cuda:
                addresses = addresses.pin_memory()
            self._addresses.copy_(addresses, non_blocking=True)
            self._pointers = list(pointers)
        with torch.cuda.device_of(self._addresses):  # type: ignore[no-untyped-call]
            for dtype, tables in self._types:
                self._launch(dtype, tables, into)

    def _launch(self, dtype: torch.dtype, tables: JobTables, into: GradientTotals) -> None:
        kernel = self._kernel
        grid = self._grid
        sketching = self._sketching
        programs = (len(tables.jobs) - 1) * grid.tiles
        scratch = kernel.scratch(programs, grid.tile)
        period = kernel.period
        rows, warps = _SHAPES[dtype.itemsize, sketching]
        launcher(kernels.measure_tiles)(
            programs,
            tables.segments, tables.jobs, self._addresses, tables.row_signs, period, *scratch,
            WIDTH=grid.width, TILES=grid.tiles, TILE=grid.tile, ROWS=rows,
            STRIDE=period.shape[1], SKETCH=sketching,
            TYPE=kernels.ELEMENTS[str(dtype)], SIZE=dtype.itemsize,
            options={"num_warps": warps, "enable_fp_fusion": True},
        )  # fmt: skip
        parts = -(-grid.width // kernels.COMBINED) * sketching + 1
        totals = into.tensors_to_fill
        rows_with_jobs = len(tables.jobs_of) - 1
        num_rows, whole = totals[0].shape if into.fresh else (rows_with_jobs, 0)
        launcher(kernels.combine)(
            num_rows * parts,
            tables.jobs_of, rows_with_jobs, *scratch, *totals,
            WIDTH=grid.width, TILES=grid.tiles, TILE=grid.tile, ROWS=_ROWS_COMBINED,
            SKETCH=sketching, FRESH=into.fresh, WHOLE=whole, options=_COMBINING,
        )  # fmt: skip
        into.fresh = False


def _shifted_copies(period: Tensor, grid: Grid) -> Tensor:
    """Return sign bits for the columns of all tiles from any place: one copy for each alignment."""
    length = -(-(PERIOD + grid.tiles * grid.tile + 2 * ALIGNED) // 16) * 16
    bits = (extend(period, length) < 0).to(torch.int8) * -128
    shifts = range(-ALIGNED, 0)  # columns left of a row have signs of no meaning
    return torch.stack([bits.roll(-shift) for shift in shifts])


def hand_over(
    totals: GradientTotals,
    reduced: GradientTotals | None,
    folding: Folding,
    given: Mapping[str, Tensor],
    take: Callable[[int], Tensor],
) -> Tensor:
    """Gather numbers and sketches with one launch, and one more for each given vector.

    ``given`` holds float64 vectors of the numbers that are not in the totals, by their names in
    ``NUMBERS``; ``take`` returns so many words of 64 bits on the device. The result is float64
    ``[n]``: the numbers in the order of ``NUMBERS``, and behind them the float32 sketches, padded.
    """
    num_rows = folding.num_rows
    lengths = {
        "squares": num_rows,
        "reduced_squares": num_rows * folding.reduced,
        "largest": 1,
        "nonfinite": 1,
        **{name: len(vector) for name, vector in given.items()},
    }
    firsts = {}
    first = 0
    for name in NUMBERS:
        firsts[name] = first
        first += lengths.get(name, 0)
    num_floats = sum(folding.lengths.values())
    memory = take(first + -(-num_floats // 2)).view(torch.float64)
    for name, vector in given.items():
        memory[firsts[name] : firsts[name] + len(vector)] = vector
    other = totals if reduced is None else reduced
    device = memory.device
    table = _table(folding, device)
    with torch.cuda.device_of(memory):  # type: ignore[no-untyped-call]
        launcher(kernels.gather)(
            len(table) + 1,
            table, totals.sketches, other.sketches, fold_signs(folding.wide, 0, device),
            memory[first:].view(torch.float32), totals.squared_norms, other.squared_norms,
            totals.largest, totals.nonfinite, memory, len(table), num_rows, firsts["largest"],
            WIDE=folding.wide, REDUCED=reduced is not None,
        )  # fmt: skip
    return memory


@functools.lru_cache(maxsize=16)
def _table(folding: Folding, device: torch.device) -> Tensor:
    """Return the table of the programs' sketches and columns."""
    programs = [
        (*sketch, column)
        for sketch in folding.wanted
        for column in range(0, sketch[3], kernels.GATHERED)
    ]
    table = torch.tensor(programs, dtype=torch.int64, device="cpu").reshape(
        -1, kernels.GATHER_FIELDS
    )
    return table.to(device)
