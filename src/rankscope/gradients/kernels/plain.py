"""The sketch in plain torch, for any device."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rankscope.gradients.kernels.interface import PERIOD, Kernel, ParameterSigns, Piece, extend
from rankscope.gradients.totals import GradientTotals

_CHUNK_ELEMENTS = {"cpu": 1 << 18}  # a megabyte in fp32: stays near the core
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 21

# Squares of magnitudes in this range neither overflow in a chunk's sum nor lose digits.
_SMALLEST_SAFE = 2.0**-40
_LARGEST_SAFE = 2.0**50


class PlainKernel(Kernel):
    """Works through a gradient in chunks of whole rows.

    ``waits``: whether the host may read numbers off the device; by default, on the CPU alone.
    """

    name = "torch"

    def __init__(
        self, device: torch.device, width: int, period: Tensor, *, waits: bool | None = None
    ) -> None:
        elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_ACCELERATOR)
        self._width = width
        self._size = max(1, elements // width) * width
        self._one_period = period
        self._scratch = self._period = torch.empty(0, device=device, dtype=torch.float32)
        waits = device.type == "cpu" if waits is None else waits
        self._sums: type[_HostSums | _DeviceSums] = _HostSums if waits else _DeviceSums

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> "PlainPieces":
        """Prepare to measure several gradients, piece by piece."""
        return PlainPieces(self, pieces)

    def add(self, flat: Tensor, piece: Piece, into: GradientTotals) -> None:
        """Add the elements ``[n]`` of a piece to its row of totals; any floating dtype."""
        if not len(self._scratch):  # not before: a faster kernel may do all the work
            device = self._scratch.device
            self._scratch = torch.empty(self._size, device=device, dtype=torch.float32)
            self._period = extend(self._one_period, PERIOD + self._size).to(device)
        sums = self._sums()
        signs = piece.signs
        for position, chunk in self._chunks(flat, piece.start if signs else 0):
            if signs is None:
                values = self._scratch[: len(chunk)].copy_(chunk)
            else:
                values = self._sketch(chunk, signs, position, into.sketches[piece.row])
            sums.add(values, chunk)
        sums.store(into, piece.row)

    def _sketch(
        self, chunk: Tensor, signs: ParameterSigns, position: int, sketch: Tensor
    ) -> Tensor:
        """Add a chunk to a sketch; return it with its signs of prime period."""
        signed = self._sign(chunk, position + signs.shift)
        row, column = divmod(position, self._width)
        rows = signs.rows(row + -(-len(chunk) // self._width))[row:]
        self._add_rows(signed, rows, column, sketch)
        return signed

    def _sign(self, chunk: Tensor, position: int) -> Tensor:
        signed = self._scratch[: len(chunk)]
        offset = position % PERIOD
        period = self._period[offset : offset + len(chunk)]
        if chunk.dtype == torch.float32:
            return torch.mul(chunk, period, out=signed)
        return signed.copy_(chunk).mul_(period)

    def _chunks(self, flat: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Cut into the rest of a row, if it does not start at one, and chunks of rows."""
        head = min(-start % self._width, len(flat))
        if head:
            yield start, flat[:head]
        for first in range(head, len(flat), self._size):
            yield start + first, flat[first : first + self._size]

    def _add_rows(self, signed: Tensor, row_signs: Tensor, column: int, sketch: Tensor) -> None:
        full = len(signed) // self._width
        if full:
            matrix = signed[: full * self._width].view(full, self._width)
            sketch.addmv_(matrix.t(), row_signs[:full])
        rest = len(signed) - full * self._width
        if rest:
            sketch[column : column + rest].addcmul_(
                signed[full * self._width :], row_signs[full].expand(rest)
            )


class PlainPieces:
    """Measures several gradients one after the other."""

    def __init__(self, kernel: PlainKernel, pieces: Sequence[Piece]) -> None:
        self._kernel = kernel
        self._pieces = pieces

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals; see :class:`~rankscope.gradients.kernels.interface.Prepared`."""
        for piece in self._pieces:
            flat = gradients[piece.source].detach().view(-1)
            self._kernel.add(flat[piece.offset : piece.offset + piece.count], piece, into)


class _HostSums:
    """Adds up on the CPU, where reading a number waits for nothing."""

    def __init__(self) -> None:
        self._squared_norm = 0.0
        self._largest = 0.0
        self._nonfinite = 0

    def add(self, values: Tensor, chunk: Tensor) -> None:
        """Add a chunk, given also as fp32 values of any sign, which are overwritten."""
        squares = values.mul_(values)
        largest = math.sqrt(float(squares.amax()))  # exact: the root undoes the square's rounding
        if _SMALLEST_SAFE <= largest <= _LARGEST_SAFE:
            self._squared_norm += float(squares.sum())  # in pairs: errs by 1e-7
            self._largest = max(self._largest, largest)  # keeps a NaN
        elif largest != 0 or chunk.any():
            self._squared_norm += float(chunk.double().square_().sum())
            self._nonfinite += len(chunk) - int(chunk.isfinite().sum())
            self._largest = float(chunk.abs().amax().float().clamp_min(self._largest))

    def store(self, into: GradientTotals, group: int) -> None:
        """Add the sums to one group's totals."""
        into.squared_norms[group] += self._squared_norm
        into.largest[group].clamp_min_(self._largest)
        if self._nonfinite:
            into.nonfinite[group] += self._nonfinite


class _DeviceSums:
    """Adds up on an accelerator without ever waiting for it."""

    def __init__(self) -> None:
        self._squared_norms: list[Tensor] = []
        self._largest: list[Tensor] = []
        self._nonfinite: list[Tensor] = []

    def add(self, values: Tensor, chunk: Tensor) -> None:
        """Add a chunk, given also as fp32 values of any sign, which are overwritten."""
        largest = torch.linalg.vector_norm(values, math.inf)
        scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
        self._nonfinite.append(len(chunk) - values.isfinite().sum())
        self._largest.append(largest)
        squares = values.div_(scale).square_()  # neither overflow nor vanish
        self._squared_norms.append(squares.sum().double() * scale.double().square())

    def store(self, into: GradientTotals, group: int) -> None:
        """Add the sums to one group's totals."""
        if not self._largest:
            return
        into.squared_norms[group] += torch.stack(self._squared_norms).sum()
        largest = into.largest[group]
        torch.maximum(largest, torch.stack(self._largest).amax(), out=largest)
        into.nonfinite[group] += torch.stack(self._nonfinite).sum()
