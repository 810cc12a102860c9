"""Runs the Triton kernels that measure gradients and gather the results, on CUDA."""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rankscope.bus.measured import NUMBERS
from rankscope.gradients.fold import Folding, fold_signs
from rankscope.gradients.kernels import triton as kernels
from rankscope.gradients.kernels import triton_handover as gathering
from rankscope.gradients.kernels.interface import PERIOD, Kernel, Piece, Prepared, extend
from rankscope.gradients.kernels.jobs import ALIGNED, Grid, JobTables, share_out
from rankscope.gradients.kernels.launch import launcher
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES = {(4, True): (4, 4), (4, False): (4, 4), (2, True): (8, 8), (2, False): (16, 8)}
"""Rows that are read at once, and warps, by an element's bytes and whether it is sketched.

The fastest on an H200 of those tried.
"""

_COMBINING = {"num_warps": 4, "enable_fp_fusion": True}
_ROWS_COMBINED = 16
_NORM_WIDTH = 4096  # a multiple of the tile: the norm alone needs no row of the sketch's width
_MOST_ALONE = 1024


class TritonKernel(Kernel):
    """Reads gradients once, with as many programs as the device runs at the same time.

    Parts of other types than float32, bfloat16 and float16 go to plain torch.

    Args:
        device: Where the gradients live.
        width: Sketch width k.
        period: The signs of prime period ``[PERIOD]``.
        num_processors: Of the device; read off it by default.
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
        self.period = _shifted_copies(period, self._sketch_grid.reach).to(device)
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
    """Adds several gradients to totals with two launches for each type of element.

    Args:
        kernel: Holds the shared memory.
        pieces: The pieces of the gradients.
        grid: That of sketches, or of norms alone.
    """

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
            self._types.append((dtype, tables.to(kernel.device)))

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals; see :class:`~rankscope.gradients.kernels.interface.Prepared`."""
        if pointers != self._pointers:
            self._addresses.copy_(on_its_way(pointers, self._addresses), non_blocking=True)
            self._pointers = list(pointers)
        with torch.cuda.device_of(self._addresses):  # type: ignore[no-untyped-call]
            for dtype, tables in self._types:
                self._launch(dtype, tables, into)

    def _launch(self, dtype: torch.dtype, tables: JobTables, into: GradientTotals) -> None:
        kernel = self._kernel
        grid = self._grid
        sketching = self._sketching
        programs = tables.num_jobs * grid.tiles
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
        num_rows, whole = totals[0].shape if into.fresh else (tables.num_rows, 0)
        launcher(kernels.combine)(
            num_rows * parts,
            tables.jobs_of, tables.num_rows, *scratch, *totals,
            WIDTH=grid.width, TILES=grid.tiles, TILE=grid.tile, ROWS=_ROWS_COMBINED,
            SKETCH=sketching, FRESH=into.fresh, WHOLE=whole, options=_COMBINING,
        )  # fmt: skip
        into.fresh = False


def on_its_way(numbers: Sequence[int], beside: Tensor) -> Tensor:
    """Return int64 numbers in memory from which a copy to another tensor's device need not wait."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return host.pin_memory() if beside.is_cuda else host


def _shifted_copies(period: Tensor, reach: int) -> Tensor:
    """Return sign bits for ``reach`` columns from any place: one copy for each alignment."""
    length = -(-(PERIOD + reach + 2 * ALIGNED) // 16) * 16
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

    Args:
        totals: Of the local gradient.
        reduced: Of the reduced one.
        folding: Which sketches are wanted.
        given: Float64 vectors of the numbers that are not in the totals, by their names in
            ``NUMBERS``.
        take: Returns so many words of 64 bits on the device.

    Returns:
        float64 ``[n]``: the numbers in the order of ``NUMBERS``, and behind them the float32
        sketches, padded.
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
        launcher(gathering.gather)(
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
        for column in range(0, sketch[3], gathering.COLUMNS)
    ]
    table = torch.tensor(programs, dtype=torch.int64, device="cpu").reshape(-1, gathering.FIELDS)
    return table.to(device)
