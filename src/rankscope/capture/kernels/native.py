"""The sketch, the digest and the inner product as C functions for the CPU."""

import ctypes
import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.capture.kernels.build import BuildError, built_library
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.kernels.signs import PERIOD, ParameterSigns, extend
from rankscope.capture.totals import GradientTotals

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the compiled functions call the types that they read."""

_NORM_ROW = 4096  # the norm alone needs no row of the sketch's width
_SIGN_BIT = {torch.int32: -(1 << 31), torch.int16: -(1 << 15)}


class NativeKernel:
    """Reads a gradient once, on one thread, without holding the interpreter's lock.

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
        self._function = load_function()
        self._width = width
        self._plain = PlainKernel(torch.device("cpu"), width, period)
        longer = extend(period, PERIOD + width)
        words, halves = _sign_bits(longer, torch.int32), _sign_bits(longer, torch.int16)
        self._period = (words, halves, halves)

    def measure(
        self, flat: Tensor, signs: ParameterSigns, start: int, into: GradientTotals, group: int
    ) -> None:
        """Add a flat part of a gradient to one group's totals; see :class:`PlainKernel`."""
        kind = TYPES.get(flat.dtype)
        if kind is None:
            self._plain.measure(flat, signs, start, into, group)
            return
        count, width = flat.numel(), self._width
        first = start // width
        rows = signs.rows((start + count - 1) // width + 1)
        self._function(
            kind, flat.data_ptr(), count, start, width,
            self._period[kind].data_ptr(), signs.shift, rows.data_ptr() + 4 * first,
            into.sketches.data_ptr() + 4 * width * group, *_scalars(into, group),
        )  # fmt: skip

    def measure_norm(self, flat: Tensor, into: GradientTotals, group: int) -> None:
        """Add the squared norm, largest magnitude and non-finite count alone."""
        kind = TYPES.get(flat.dtype)
        if kind is None:
            self._plain.measure_norm(flat, into, group)
            return
        self._function(
            kind, flat.data_ptr(), flat.numel(), 0, _NORM_ROW,
            None, 0, None, None, *_scalars(into, group),
        )  # fmt: skip


def _scalars(into: GradientTotals, group: int) -> tuple[int, int, int]:
    return (
        into.squared_norms.data_ptr() + 8 * group,
        into.largest.data_ptr() + 4 * group,
        into.nonfinite.data_ptr() + 8 * group,
    )


def _sign_bits(signs: Tensor, dtype: torch.dtype) -> Tensor:
    return (signs < 0).to(dtype) * _SIGN_BIT[dtype]


@functools.cache
def load_function() -> Callable[..., None]:
    """Return the compiled function that measures; it is built and loaded once per process.

    Raises:
        BuildError: It cannot be built or loaded.
    """
    function = _load_library().rankscope_measure
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [
        ctypes.c_int, pointer, integer, integer, integer,
        pointer, integer, pointer, pointer, pointer, pointer, pointer,
    ]  # fmt: skip
    function.restype = None
    compiled: Callable[..., None] = function
    return compiled


def load_digest() -> Callable[..., int]:
    """Return the compiled function that digests bytes; see ``digest.c`` for what it takes.

    Raises:
        BuildError: It cannot be built or loaded, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    _check_allowed()
    function = _load_library().rankscope_digest
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_int64, pointer, pointer, pointer, pointer]
    function.restype = ctypes.c_uint64
    compiled: Callable[..., int] = function
    return compiled


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
    try:
        return ctypes.CDLL(str(built_library()))
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error
