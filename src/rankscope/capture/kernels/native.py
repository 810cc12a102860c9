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
from rankscope.capture.kernels.flat import has_memory
from rankscope.capture.kernels.plain import PlainKernel
from rankscope.capture.kernels.signs import PERIOD, ParameterSigns, extend
from rankscope.capture.totals import GradientTotals

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the compiled functions call the types that they read."""

_TYPES_OF_TOTALS = (torch.float32, torch.float64, torch.float32, torch.int64)
_NORM_ROW = 4096  # the norm alone needs no row of the sketch's width
_UNLIMITED = 1 << 62
_SHORT = 1 << 15  # elements, read in less time than it may take to get the lock back
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
        self._functions.measure(
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
        self._functions.measure(
            kind, flat.data_ptr(), flat.numel(), 0, _NORM_ROW,
            None, 0, None, None, *_scalars(into, group),
        )  # fmt: skip

    def place(
        self, signs: ParameterSigns, start: int, into: GradientTotals, group: int, size: int
    ) -> "NativePlace":
        """Prepare to measure one parameter into the same totals again and again.

        Args:
            signs: The parameter's signs.
            start: Position of the gradients' first element in the whole flat parameter, without
                ``signs.first``.
            into: The totals to add to, whose tensors keep their memory.
            group: Which row of them.
            size: How many elements to expect.
        """
        width = self._width
        first = start + signs.first % width
        row = first // width
        rows = signs.rows((first + size - 1) // width + 1)
        prepared = _Prepared(
            first, width, signs.shift, tuple(bits.data_ptr() for bits in self._period),
            rows.data_ptr() + 4 * row, into.sketches.data_ptr() + 4 * width * group,
            *_scalars(into, group),
        )  # fmt: skip
        kept = (prepared, self._period, rows, into.tensors)
        return NativePlace(prepared, start, len(rows) * width - first, self._functions, kept)

    def norm_place(self, into: GradientTotals, group: int) -> "NativePlace":
        """Prepare to measure norms alone into the same row of totals again and again."""
        prepared = _Prepared(0, _NORM_ROW)
        prepared.squared_norm, prepared.largest, prepared.nonfinite = _scalars(into, group)
        return NativePlace(prepared, 0, _UNLIMITED, self._functions, (prepared, into.tensors))

    def measure_norms(self, gradients: Sequence[tuple[Tensor, int]], into: GradientTotals) -> None:
        """Add the norms of gradients to rows of totals, one gradient after the other.

        Args:
            gradients: Gradients that :func:`reads` tells to be readable, and their rows.
            into: The totals to add to.
        """
        described = array("q")
        for gradient, row in gradients:
            described.extend((gradient.data_ptr(), gradient.numel(), TYPES[gradient.dtype], row))
        address, _ = described.buffer_info()
        self._functions.norms(address, len(gradients), _NORM_ROW, *_scalars(into, 0))


def reads(gradient: Tensor) -> bool:
    """Return whether the compiled functions read a gradient as it lies in memory."""
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and gradient.dtype in TYPES
        and gradient.is_contiguous()
        and has_memory(gradient)
    )


class NativePlace:
    """Adds one parameter's gradients to one row of totals; all that stays the same is prepared.

    Args:
        prepared: That, for the compiled functions.
        start: Position of the gradients' first element in the whole flat parameter.
        limit: How many elements it will do for.
        functions: The compiled functions.
        kept: All memory that they work on.
    """

    __slots__ = ("_address", "_kept", "_limit", "_long", "_short", "start")

    def __init__(
        self,
        prepared: "_Prepared",
        start: int,
        limit: int,
        functions: "_Functions",
        kept: object,
    ) -> None:
        self.start = start
        self._address = ctypes.addressof(prepared)
        self._kept = kept
        self._limit = limit
        self._short, self._long = functions.measure_short_at, functions.measure_at

    def measure(self, gradient: Tensor, start: int) -> bool:
        """Add a gradient, if this is its place and it is one that :func:`reads` accepts.

        Returns:
            Whether it was added.
        """
        count = gradient.numel()
        if start != self.start or count > self._limit or not reads(gradient):
            return False
        function = self._short if count <= _SHORT else self._long
        function(self._address, TYPES[gradient.dtype], gradient.data_ptr(), count)
        return True


def _scalars(into: GradientTotals, group: int) -> tuple[int, int, int]:
    """Return the addresses of a row's numbers, once they are known to be of the types in C."""
    if tuple(tensor.dtype for tensor in into.tensors) != _TYPES_OF_TOTALS:
        raise TypeError(f"expected totals of {_TYPES_OF_TOTALS}, got {into.sketches.dtype}")
    return (
        into.squared_norms.data_ptr() + 8 * group,
        into.largest.data_ptr() + 4 * group,
        into.nonfinite.data_ptr() + 8 * group,
    )


def _sign_bits(signs: Tensor, dtype: torch.dtype) -> Tensor:
    return (signs < 0).to(dtype) * _SIGN_BIT[dtype]


class _Prepared(ctypes.Structure):
    """``place`` of ``sketch.c``: arguments that stay the same."""

    _fields_ = (
        ("start", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("period_signs", ctypes.c_void_p * 3),
        ("row_signs", ctypes.c_void_p),
        ("sketch", ctypes.c_void_p),
        ("squared_norm", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("nonfinite", ctypes.c_void_p),
    )


class _Functions(NamedTuple):
    """The compiled functions that measure; see ``sketch.c`` for what they take.

    Attributes:
        measure: Adds a flat part of a gradient.
        measure_at: The same with prepared arguments.
        measure_short_at: The same without letting go of the interpreter's lock.
        norms: Adds the norms of several gradients.
    """

    measure: Callable[..., None]
    measure_at: Callable[[int, int, int, int], None]
    measure_short_at: Callable[[int, int, int, int], None]
    norms: Callable[..., None]


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
    at = [pointer, ctypes.c_int, pointer, integer]
    holding_lock = ctypes.PYFUNCTYPE(None, *at)
    return _Functions(
        _typed(library.rankscope_measure, whole),
        _typed(library.rankscope_measure_at, at),
        holding_lock(("rankscope_measure_at", library)),
        _typed(library.rankscope_norms, [pointer, integer, integer, pointer, pointer, pointer]),
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
    function.argtypes = [pointer, ctypes.c_int64, pointer, pointer, pointer, pointer]
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
