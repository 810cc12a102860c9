"""The compiled library of the kernels for the CPU, and what calls it: the sketch, and batches.

There is one file for each level of vector instructions. ``build.py`` compiles it when the package
is built. Without it, plain torch does its work. A batch is read on the host in C, since where a
model is small, a few operations of torch take longer.
"""

import ctypes
import functools
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.gradients.kernels.build import FOLDER, hash_sources
from rankscope.gradients.kernels.interface import PERIOD, Kernel, Piece, Prepared, extend
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the types that the compiled functions read."""

_LEVEL_OF = {"AVX512": "avx512", "AVX2": "avx2"}
"""The library by torch's name for the processor's level; elsewhere ``default``."""

_FUNCTIONS = {
    "measure_many": ("", "pqpqppppp"),
    "hand_over": ("", "ppppp"),
    "digest": ("Q", "pqqp"),
    "digests": ("", "pqp"),
    "samples": ("", "ppiqqpqqp"),
    "labels": ("q", "pqqqq"),
    "deposit": ("", "ipqpip"),
    "convert": ("", "pqqqdip"),
}
"""Kinds of the result and of the arguments, by the function's name without ``rankscope_``."""

_KINDS: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "d": ctypes.c_double,
    "": None,
}
_NORM_ROW = 4096  # the norm alone needs no row of the sketch's width
_SIGN_BIT = {torch.int32: -(1 << 31), torch.int16: -(1 << 15)}
_MASKS = {torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4, torch.int64: 8}
_log = logging.getLogger("rankscope")


class NoLibraryError(Exception):
    """The compiled functions cannot be used; the message has the reason, and the remedy."""


class StaleLibraryError(NoLibraryError):
    """The library was compiled from other sources than those beside it."""


def compiled(name: str, *, holding_lock: bool = False) -> Callable[..., Any]:
    """Return a compiled function, a key of ``_FUNCTIONS``; the sources in C have its arguments.

    With ``holding_lock``, for short work, it keeps the interpreter's lock. NoLibraryError says that
    there is no library for it, or that ``RANKSCOPE_NATIVE=0`` forbids it.
    """
    if os.environ.get("RANKSCOPE_NATIVE") == "0":
        raise NoLibraryError("RANKSCOPE_NATIVE=0")
    library = load_once()
    if isinstance(library, NoLibraryError):
        raise type(library)(str(library)) from library
    returns, takes = _FUNCTIONS[name]
    kinds = [_KINDS[kind] for kind in takes]
    if holding_lock:
        return ctypes.PYFUNCTYPE(_KINDS[returns], *kinds)((f"rankscope_{name}", library))
    function: Any = getattr(library, f"rankscope_{name}")
    function.argtypes = kinds
    function.restype = _KINDS[returns]
    loaded: Callable[..., Any] = function
    return loaded


@functools.cache
def load_once() -> ctypes.CDLL | NoLibraryError:
    """Return the library, or why there is none, which is logged once per process."""
    try:
        return load(library_path())
    except NoLibraryError as error:
        level = logging.WARNING if isinstance(error, StaleLibraryError) else logging.INFO
        _log.log(level, "plain torch does the work of compiled kernels, slower: %s", error)
        return error


def library_path() -> Path:
    """Return where the library for this processor is, if there is one."""
    level = _LEVEL_OF.get(torch.backends.cpu.get_cpu_capability(), "default")
    return FOLDER / f"kernels-{level}.so"


def load(path: Path) -> ctypes.CDLL:
    """Return a library, or raise NoLibraryError with the reason and the remedy."""
    expected = hash_sources()
    helps = "with a C compiler, install rankscope anew"
    if expected is not None:
        helps = f"run `python {FOLDER / 'build.py'}`"
    if not path.exists():
        raise NoLibraryError(f"{path} is missing; {helps}")
    try:
        library = ctypes.CDLL(str(path))
        found = ctypes.c_char_p.in_dll(library, "rankscope_sources").value
    except (OSError, ValueError) as error:
        raise NoLibraryError(f"{path} cannot be loaded: {error}") from error
    if expected is not None and found != expected.encode():
        raise StaleLibraryError(
            f"{path} was compiled from other sources than those beside it; {helps}"
        )
    return library


class NativeKernel(Kernel):
    """Reads a gradient once, on one thread; long ones without holding the interpreter's lock.

    Other types than float32, bfloat16 and float16 go to plain torch.
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

    ``period`` holds the signs of prime period by type; None measures norms alone.
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


def count_labels(labels: Tensor, ignored: int, *, first: int) -> int | None:
    """Return how many labels ``[..., n]`` count; None if these labels are not for this function.

    Those with the value ``ignored`` do not, nor those before the place ``first`` in each sequence.
    """
    counts = _function("labels")
    if counts is None or not _is_plain(labels) or not labels.dim():
        return None
    length = labels.shape[-1]
    rows = labels.numel() // length if length else 0
    count: int = counts(labels.data_ptr(), rows, length, first, ignored)
    return count


def digest_samples(
    batch: Tensor, mask: Tensor | None, weights: int, places: int, mix: int
) -> "array[int] | None":
    """Return int64 digests of a batch's samples ``[B, n]``; None if it is not for this function.

    It is a sum of the words that ``mask`` marks, or of all, each times a weight by its place.
    ``weights`` is the address of int64 ``[places]``, ``mix`` an odd number, as int64.
    """
    digest = _function("samples")
    if digest is None or not _is_plain(batch) or batch.dim() != 2:
        return None
    samples, length = batch.shape
    address = None
    size = 0
    if mask is not None:
        size = _MASKS.get(mask.dtype, 0)
        if not size or not mask.is_cpu or not mask.is_contiguous():
            return None
        address = mask.data_ptr()
    elif length > places:
        return None
    digests = array("q", bytes(8 * samples))
    digest(
        batch.data_ptr(), address, size, samples, length, weights, places, mix,
        digests.buffer_info()[0],
    )  # fmt: skip
    return digests


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.dtype is torch.int64
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    try:
        return compiled(name, holding_lock=True)
    except NoLibraryError:
        return None
