"""The sketch as a C function for the CPU."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.gradients.kernels.interface import PERIOD, Kernel, Piece, Prepared, extend
from rankscope.gradients.kernels.library import compiled
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the types that the compiled functions read."""

_NORM_ROW = 4096  # the norm alone needs no row of the sketch's width
_SIGN_BIT = {torch.int32: -(1 << 31), torch.int16: -(1 << 15)}


class NativeKernel(Kernel):
    """Reads a gradient once, on one thread; long ones without holding the interpreter's lock.

    Other types than float32, bfloat16 and float16 go to plain torch.

    Args:
        width: Sketch width k.
        period: The signs of prime period ``[PERIOD]``.

    Raises:
        NoLibraryError: There is no library, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """

    name = "native"

    def __init__(self, width: int, period: Tensor) -> None:
        self._measure_many = compiled("measure_many")
        self._width = width
        self._plain = PlainKernel(torch.device("cpu"), width, period)
        longer = extend(period, PERIOD + width)
        words = _sign_bits(longer, torch.int32)
        halves = _sign_bits(longer, torch.int16)
        self._period = (words, halves, halves)

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> Prepared:
        """Prepare to measure several gradients in one call."""
        if pieces[0].dtype not in TYPES:
            return self._plain.prepare(pieces, sketching=sketching)
        width = self._width if sketching else _NORM_ROW
        period = self._period if sketching else None
        return NativePieces(self._measure_many, pieces, width, period)


class NativePieces:
    """Adds several gradients to totals in one call, without holding the interpreter's lock.

    Args:
        measure_many: The compiled function.
        pieces: The pieces of the gradients.
        width: Elements in a row.
        period: The signs of prime period by type; None to measure norms alone.
    """

    def __init__(
        self,
        measure_many: Callable[..., Any],
        pieces: Sequence[Piece],
        width: int,
        period: Sequence[Tensor] | None,
    ) -> None:
        self._measure = measure_many
        self._number = len(pieces)
        self._width = width
        self._sketching = period is not None
        described = array("q")
        signs = []
        for piece in pieces:
            offset = piece.offset * piece.dtype.itemsize
            described.extend((piece.source, offset, piece.count, TYPES[piece.dtype], piece.row))
            if piece.signs is None:
                described.extend((0, 0, 0))
                continue
            signs.append(piece.signs.rows((piece.start + piece.count - 1) // width + 1))
            row_signs = signs[-1].data_ptr() + 4 * (piece.start // width)
            described.extend((piece.start, piece.signs.shift, row_signs))
        of_type = array("q", [bits.data_ptr() for bits in period or ()])
        self._pieces = described.buffer_info()[0]
        self._period = of_type.buffer_info()[0]
        self._kept = described, of_type, signs, period

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals; see :class:`~rankscope.gradients.kernels.interface.Prepared`."""
        begins = array("q", pointers)
        sketches, *scalars = map(Tensor.data_ptr, into.tensors)
        self._measure(
            self._pieces, self._number, begins.buffer_info()[0], self._width, self._period,
            sketches if self._sketching else None, *scalars,
        )  # fmt: skip


def _sign_bits(signs: Tensor, dtype: torch.dtype) -> Tensor:
    return (signs < 0).to(dtype) * _SIGN_BIT[dtype]
