"""The sketch as a C function for the CPU, and the table of all functions in C."""

import ctypes
import functools
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.capture.kernels.build import BuildError, UnsafeCacheError, built_library, tell_plain
from rankscope.capture.kernels.interface import PERIOD, Kernel, Piece, Prepared, extend
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.totals import GradientTotals

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the compiled functions call the types that they read."""

_NORM_ROW = 4096  # the norm alone needs no row of the sketch's width
_SIGN_BIT = {torch.int32: -(1 << 31), torch.int16: -(1 << 15)}


class NativeKernel(Kernel):
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

    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> Prepared:
        """Prepare to measure several gradients in one call."""
        if pieces[0].dtype not in TYPES:
            return self._plain.prepare(pieces, sketching=sketching)
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
        sketches, *scalars = map(Tensor.data_ptr, into.tensors)
        self._measure(
            self._pieces, self._number, begins.buffer_info()[0], self._width, self._period,
            sketches if self._sketching else None, *scalars,
        )  # fmt: skip


def _sign_bits(signs: Tensor, dtype: torch.dtype) -> Tensor:
    return (signs < 0).to(dtype) * _SIGN_BIT[dtype]


class _Functions(NamedTuple):
    """The compiled functions that measure; see ``sketch.c`` for what they take.

    Attributes:
        measure_many: Adds pieces of several gradients.
        hand_over: Gathers what is handed over of totals.
    """

    measure_many: Callable[..., None]
    hand_over: Callable[..., None]


_KINDS: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "d": ctypes.c_double,
    "": None,
}

_FUNCTIONS = {
    "measure_many": ("", "pqpqppppp"),
    "hand_over": ("", "ppppp"),
    "digest": ("Q", "pqqp"),
    "digests": ("", "pqp"),
    "dot": ("d", "ippq"),
    "samples": ("", "ppiqqpqqp"),
    "labels": ("q", "pqqqq"),
}
"""What the compiled functions return, and what they take, by their names without ``rankscope_``."""


@functools.cache
def load_functions() -> _Functions:
    """Return the compiled functions that measure; they are built and loaded once per process.

    Raises:
        BuildError: They cannot be built or loaded.
    """
    library = _library_or_raise(try_to_load())
    return _Functions(*(typed(library, name, *_FUNCTIONS[name]) for name in _Functions._fields))


def compiled(name: str, *, holding_lock: bool = False) -> Callable[..., Any]:
    """Return a compiled function; see the sources in C for what it takes.

    Args:
        name: A key of ``_FUNCTIONS``.
        holding_lock: Whether it keeps the interpreter's lock, for what is done at once.

    Raises:
        BuildError: It cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    return typed(load_library(), name, *_FUNCTIONS[name], holding_lock=holding_lock)


def typed(
    library: ctypes.CDLL, name: str, returns: str, takes: str, *, holding_lock: bool = False
) -> Callable[..., Any]:
    """Return a function of a library, given the kinds of what it returns and takes."""
    kinds = [_KINDS[kind] for kind in takes]
    if holding_lock:
        return ctypes.PYFUNCTYPE(_KINDS[returns], *kinds)((f"rankscope_{name}", library))
    function: Any = getattr(library, f"rankscope_{name}")
    function.argtypes, function.restype = kinds, _KINDS[returns]
    loaded: Callable[..., Any] = function
    return loaded


def load_library(*files: Sequence[Path]) -> ctypes.CDLL:
    """Return a compiled library: that of the kernels, or of other files in C and their headers.

    Raises:
        BuildError: It cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    _check_allowed()
    return _library_or_raise(try_to_load(*files))


def _check_allowed() -> None:
    if os.environ.get("RANKSCOPE_NATIVE") == "0":
        raise BuildError("RANKSCOPE_NATIVE=0")


def _library_or_raise(library: ctypes.CDLL | BuildError) -> ctypes.CDLL:
    if isinstance(library, BuildError):
        raise BuildError(str(library)) from library
    return library


@functools.cache
def try_to_load(*files: Sequence[Path]) -> ctypes.CDLL | BuildError:
    """Return a compiled library or why there is none: each process tries to build it once."""
    try:
        return ctypes.CDLL(str(built_library(*files)))
    except UnsafeCacheError as error:
        tell_plain("what is faster in C", error, logging.WARNING)
        return error
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"the compiled functions cannot be loaded: {error}")
