"""Runs the fused Triton kernel on a CUDA device."""

import torch
from torch import Tensor

from rankscope.capture.kernels import triton as kernels
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.kernels.signs import PERIOD, ParameterSigns, extend
from rankscope.capture.totals import GradientTotals

_TILE = 1024  # columns
_ROWS = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}  # of a tile, read at once
_WARPS = 4
_PROGRAMS_PER_PROCESSOR = 4
_ROWS_COMBINED = 16
_NORM_WIDTH = 4096  # a multiple of the tile: the norm alone needs no row of the sketch's width


class TritonKernel:
    """Reads a gradient once, with as many programs as the device runs at the same time.

    Other types than float32, bfloat16 and float16 go to plain torch.

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
        self._width = width
        self._plain = PlainKernel(device, width, period)
        self._sketch_grid = _Grid(width, num_processors)
        self._norm_grid = _Grid(_NORM_WIDTH, num_processors)
        self._period = _shifted_copies(period, self._sketch_grid.reach).to(device)
        programs = max(self._sketch_grid.most_programs, self._norm_grid.most_programs)
        slices = self._sketch_grid.most_slices
        self._sketches = torch.empty(slices, width, device=device, dtype=torch.float32)
        self._norms = torch.empty(programs, device=device, dtype=torch.float64)
        self._tops = torch.empty(programs, device=device, dtype=torch.float32)
        self._nonfinite = torch.empty(programs, device=device, dtype=torch.int64)

    def measure(
        self, flat: Tensor, signs: ParameterSigns, start: int, into: GradientTotals, group: int
    ) -> None:
        """Add a flat part of a gradient to one group's totals; see :class:`PlainKernel`."""
        if flat.dtype not in _ROWS:
            self._plain.measure(flat, signs, start, into, group)
            return
        first_row, first_column = divmod(start, self._width)
        num_rows = (first_column + len(flat) - 1) // self._width + 1
        first_phase = (start - first_column + signs.shift) % PERIOD
        row_signs = signs.rows(first_row + num_rows)
        place = (first_column, first_row, first_phase, num_rows)
        self._launch(flat, row_signs, place, self._sketch_grid, into, group)

    def measure_norm(self, flat: Tensor, into: GradientTotals, group: int) -> None:
        """Add the squared norm, largest magnitude and non-finite count alone."""
        if flat.dtype not in _ROWS:
            self._plain.measure_norm(flat, into, group)
            return
        place = (0, 0, 0, -(-len(flat) // _NORM_WIDTH))
        self._launch(flat, self._tops, place, self._norm_grid, into, group)

    def _launch(
        self,
        flat: Tensor,
        row_signs: Tensor,
        place: tuple[int, int, int, int],
        grid: "_Grid",
        into: GradientTotals,
        group: int,
    ) -> None:
        sketching = grid is self._sketch_grid
        rows = _ROWS[flat.dtype]
        slices = grid.slices(place[-1], rows)
        programs = slices * grid.tiles
        scratch = (self._sketches, self._norms, self._tops, self._nonfinite)
        with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
            kernels.measure_tiles[(programs,)](
                flat, row_signs, self._period, *scratch, len(flat), *place, slices,
                WIDTH=grid.width, TILES=grid.tiles, TILE=grid.tile, ROWS=rows,
                STRIDE=self._period.shape[1], SKETCH=sketching, num_warps=_WARPS,
                enable_fp_fusion=True,
            )  # fmt: skip
            kernels.combine[(-(-self._width // kernels.COMBINED) * sketching + 1,)](
                *scratch, into.sketches, into.squared_norms, into.largest, into.nonfinite,
                group, slices, programs, WIDTH=self._width, ROWS=_ROWS_COMBINED,
                num_warps=_WARPS, enable_fp_fusion=True,
            )  # fmt: skip


class _Grid:
    """How rows of a width are cut into tiles and shared out.

    Args:
        width: Elements in a row.
        num_processors: Of the device.
    """

    def __init__(self, width: int, num_processors: int) -> None:
        reach = width + kernels.ALIGNED - 1  # columns are shifted by up to three
        self.width = width
        self.tile = min(_TILE, max(128, 1 << (reach - 1).bit_length()))
        if width % self.tile == 0:  # then rows are aligned, and nothing is shifted
            reach = width
        self.tiles = -(-reach // self.tile)
        slices = num_processors * _PROGRAMS_PER_PROCESSOR // self.tiles
        self.most_slices = max(kernels.ALIGNED, slices // kernels.ALIGNED * kernels.ALIGNED)

    @property
    def reach(self) -> int:
        """Columns in all tiles."""
        return self.tiles * self.tile

    @property
    def most_programs(self) -> int:
        return self.most_slices * self.tiles

    def slices(self, num_rows: int, rows_at_once: int) -> int:
        """Return how many interleaved sets of rows to make, so that each has some rows."""
        wanted = -(-num_rows // rows_at_once)
        return min(self.most_slices, -(-wanted // kernels.ALIGNED) * kernels.ALIGNED)


def _shifted_copies(period: Tensor, reach: int) -> Tensor:
    """Return sign bits for ``reach`` columns from any place: one copy for each alignment."""
    length = -(-(PERIOD + reach + 2 * kernels.ALIGNED) // 16) * 16
    bits = (extend(period, length) < 0).to(torch.int8) * -128
    shifts = range(-kernels.ALIGNED, 0)  # columns left of a row have signs of no meaning
    return torch.stack([bits.roll(-shift) for shift in shifts])
