"""The sketch, the digest and the inner product as C functions for the CPU."""

import ctypes
import functools
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.capture.kernels.build import BuildError, built_library
from rankscope.capture.kernels.interface import PERIOD, ParameterSigns, Piece, extend
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.totals import GradientTotals

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the compiled functions call the types that they read."""

_NORM_ROW = 4096  # the norm alone needs no row of the sketch's width
_SIGN_BIT = {torch.int32: -(1 << 31), torch.int16: -(1 << 15)}


class NativeKernel:
    """Reads a gradient once, on one thread; long ones without holding the interpreter's lock.

    Other types than float32, bfloat16 and float16 go to plain torch.

    Args:
        width: Sketch width k.
        period: The signs of prime period ``[PERIOD]``.

    Raises:
        BuildError: The library cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """

    name = "native"

    def __init__(self, width: int, period: Tensor) -> None:
        _check_allowed()
        self._functions = load_functions()
        self._width = width
        self._plain = PlainKernel(torch.device("cpu"), width, period)
        longer = extend(period, PERIOD + width)
        words, halves = _sign_bits(longer, torch.int32), _sign_bits(longer, torch.int16)
        self._period = (words, halves, halves)

    def measure(
        self,
        flat: Tensor,
        signs: ParameterSigns | None,
        start: int,
        into: GradientTotals,
        group: int,
    ) -> None:
        """Add a flat part of a gradient to one group's totals; see :class:`PlainKernel`."""
        kind = TYPES.get(flat.dtype)
        if kind is None:
            self._plain.measure(flat, signs, start, into, group)
            return
        count, width, scalars = flat.numel(), self._width, _scalars(into, group)
        if signs is None:
            self._functions.measure(
                kind, flat.data_ptr(), count, 0, _NORM_ROW, None, 0, None, None, *scalars
            )
            return
        first = start // width
        rows = signs.rows((start + count - 1) // width + 1)
        self._functions.measure(
            kind, flat.data_ptr(), count, start, width,
            self._period[kind].data_ptr(), signs.shift, rows.data_ptr() + 4 * first,
            into.sketches.data_ptr() + 4 * width * group, *scalars,
        )  # fmt: skip

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> "NativePieces":
        """Prepare to measure several gradients in one call."""
        width = self._width if sketching else _NORM_ROW
        period = self._period if sketching else None
        return NativePieces(self._functions, pieces, width, period)


class NativePieces:
    """Adds several gradients to totals in one call, without holding the interpreter's lock.

    Args:
        functions: The compiled functions.
        pieces: What the gradients consist of.
        width: Elements in a row.
        period: The signs of prime period by type; None to measure norms alone.
    """

    def __init__(
        self,
        functions: "_Functions",
        pieces: Sequence[Piece],
        width: int,
        period: Sequence[Tensor] | None,
    ) -> None:
        self._measure = functions.measure_many
        self._number, self._width = len(pieces), width
        self._sketching = period is not None
        described, signs = array("q"), []
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
        self._pieces, self._period = described.buffer_info()[0], of_type.buffer_info()[0]
        self._kept = described, of_type, signs, period

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients to totals; see :class:`~rankscope.capture.kernels.interface.Prepared`."""
        begins = array("q", pointers)
        sketches = into.sketches.data_ptr() if self._sketching else None
        self._measure(
            self._pieces, self._number, begins.buffer_info()[0], self._width, self._period,
            sketches, *_scalars(into, 0),
        )  # fmt: skip


def _scalars(into: GradientTotals, group: int) -> tuple[int, int, int]:
    """Return the addresses of a row's numbers."""
    _, squared_norms, largest, nonfinite = into.tensors
    return (
        squared_norms.data_ptr() + 8 * group,
        largest.data_ptr() + 4 * group,
        nonfinite.data_ptr() + 8 * group,
    )


def _sign_bits(signs: Tensor, dtype: torch.dtype) -> Tensor:
    return (signs < 0).to(dtype) * _SIGN_BIT[dtype]


class _Functions(NamedTuple):
    """The compiled functions that measure; see ``sketch.c`` for what they take.

    Attributes:
        measure: Adds a flat part of a gradient.
        measure_many: Adds pieces of several gradients.
        hand_over: Gathers what is handed over of totals.
    """

    measure: Callable[..., None]
    measure_many: Callable[..., None]
    hand_over: Callable[..., None]


@functools.cache
def load_functions() -> _Functions:
    """Return the compiled functions that measure; they are built and loaded once per process.

    Raises:
        BuildError: They cannot be built or loaded.
    """
    library = _load_library()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    whole = [
        ctypes.c_int, pointer, integer, integer, integer,
        pointer, integer, pointer, pointer, pointer, pointer, pointer,
    ]  # fmt: skip
    many = [pointer, integer, pointer, integer, *[pointer] * 5]
    return _Functions(
        _typed(library.rankscope_measure, whole),
        _typed(library.rankscope_measure_many, many),
        _typed(library.rankscope_hand_over, [pointer] * 5),
    )


def _typed(function: Any, takes: Sequence[type]) -> Callable[..., None]:
    function.argtypes, function.restype = takes, None
    typed: Callable[..., None] = function
    return typed


def load_digest() -> Callable[..., int]:
    """Return the compiled function that digests bytes; see ``digest.c`` for what it takes.

    Raises:
        BuildError: It cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    _check_allowed()
    function = _load_library().rankscope_digest
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, pointer]
    function.restype = ctypes.c_uint64
    compiled: Callable[..., int] = function
    return compiled


def load_digests() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the compiled function that digests many parts; see ``digest.c`` for what it takes.

    Returns:
        It, and the same without letting go of the interpreter's lock.

    Raises:
        BuildError: It cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    _check_allowed()
    library = _load_library()
    takes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    holding_lock = ctypes.PYFUNCTYPE(None, *takes)(("rankscope_digests", library))
    return _typed(library.rankscope_digests, takes), holding_lock


def load_dot() -> Callable[[int, int, int, int], float]:
    """Return the compiled inner product; see ``dot.c`` for what it takes.

    Raises:
        BuildError: It cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    _check_allowed()
    function = _load_library().rankscope_dot
    pointer = ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, ctypes.c_int64]
    function.restype = ctypes.c_double
    compiled: Callable[[int, int, int, int], float] = function
    return compiled


def _check_allowed() -> None:
    if os.environ.get("RANKSCOPE_NATIVE") == "0":
        raise BuildError("RANKSCOPE_NATIVE=0")


def _load_library() -> ctypes.CDLL:
    library = try_to_load()
    if isinstance(library, BuildError):
        raise BuildError(str(library)) from library
    return library


@functools.cache
def try_to_load() -> ctypes.CDLL | BuildError:
    """Return the compiled kernels or why there are none: each process tries to build them once."""
    try:
        return ctypes.CDLL(str(built_library()))
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"the compiled kernels cannot be loaded: {error}")
