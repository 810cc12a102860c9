"""Weighted sums of the words of memory, equal wherever and in whatever order they are added up.

A row is ``ROW`` words ``w`` of 64 bits, each cut into a lower half (unsigned) and an upper half
(signed). With random odd keys ``a`` and ``b`` for every place in a row, and an odd multiplier ``m``
for every row, modulo 2^64:

    digest  =  sum_r m_r  sum_i  w_ri a_i + upper(w_ri) b_i

Any two different contents agree with a chance of about 2^-30 at worst, and 2^-64 as a rule: this is
multilinear hashing, with keys twice as wide as what they multiply. A change of a single half is
always seen, since its key is odd.
"""

import functools
import threading
from array import array
from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.gradients.kernels.launch import log_fallback
from rankscope.gradients.kernels.native import compiled

ROW = 512
"""Words of 64 bits in a row; with its keys, it fits into the first-level cache."""

ROW_BYTES = 8 * ROW
CHUNK_BYTES = 1 << 20
"""Bytes of a row's multiple that plain torch works on at once on the CPU."""

CHUNK_BYTES_ACCELERATOR = 1 << 23

NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4,
           torch.complex64: 1, torch.complex128: 4}  # fmt: skip
"""Numbers of the types whose squares the compiled functions add up."""

_NUM_MULTIPLIERS = 1 << 16  # rows; then they begin again, times another factor
_BLOCK_FACTOR = 0xD1342543DE82EF95
_SHORT = 1 << 17  # bytes, read in less time than it may take to get the interpreter's lock back
_MODULUS = 1 << 64

_scratch = threading.local()


def chunk_bytes(device: torch.device) -> int:
    """Return how many bytes are worked on at once, a multiple of a row's."""
    return CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_ACCELERATOR


def sum_words(pieces: Iterable[Tensor], device: torch.device) -> int | Tensor:
    """Return the weighted sum of the words of consecutive pieces, padded with zeros at the end.

    Pieces are contiguous ``[n]``, of any dtype; all but the last fill whole rows. The sum is a
    number below 2^64 on the CPU; elsewhere an int64 tensor ``[]`` on the device, for which nothing
    waits.
    """
    native = native_sum() if device.type == "cpu" else None
    if native is None:
        return plain_sum(pieces, device)
    total = row = 0
    for piece in pieces:
        total += native.at(piece.data_ptr(), piece.nbytes, row)
        row += piece.nbytes // ROW_BYTES
    return total % _MODULUS


def signed(number: int) -> int:
    """Return a number modulo 2^64 as int64 holds it."""
    number %= _MODULUS
    return number - _MODULUS if number >= _MODULUS // 2 else number


@functools.cache
def native_sum() -> "NativeSum | None":
    """Return the sum in C, or None where it is missing or errs."""
    try:
        native = NativeSum()
        sample = torch.from_numpy(_mixed(5 * ROW, seed=9).view(np.uint8))
        for part in (sample[: 4 * ROW_BYTES + 1003], sample[:5], sample[3 : ROW_BYTES + 3]):
            if native.at(part.data_ptr(), len(part)) != plain_sum([part], part.device):
                raise ArithmeticError("the native digest errs")
    except Exception as error:  # whatever it is, training goes on, a little slower
        log_fallback("bits are digested", error)
        return None
    return native


class NativeSum:
    """Adds up in C, on one thread, without holding the interpreter's lock."""

    def __init__(self) -> None:
        self._function = compiled("digest")
        self.many = compiled("digests")
        self.few = compiled("digests", holding_lock=True)
        first, second = _keys()
        keys = np.stack([first, (first << np.uint64(32)) + second], axis=1).reshape(-1)
        low = keys.astype(np.uint32)
        odd = np.roll(low, -1)
        moved = (keys[1::2] << np.uint64(31)).sum()
        tables = (low, odd, (keys >> np.uint64(32)).astype(np.uint32), _multipliers())
        addresses = [table.ctypes.data for table in tables]
        self._tables = (*tables, np.array([*addresses, _BLOCK_FACTOR, moved], np.uint64))
        self.tables_at: int = self._tables[-1].ctypes.data

    def at(self, address: int, count: int, row: int = 0) -> int:
        """Return the weighted sum, modulo 2^64, of ``count`` bytes, which begin a row."""
        total: int = self._function(address, count, row, self.tables_at)
        return total


class Parts:
    """N parts of memory that one call reads, again and again.

    ``parts`` holds for each its address, its bytes, and its type, one of ``NUMBERS``, if its
    squares are wanted, else 0. ``known`` is a number to add to each sum, below 2^64.
    """

    __slots__ = ("_arguments", "_behind", "_function", "_known", "_results", "_table")

    def __init__(self, native: NativeSum, parts: list[int], known: list[int]) -> None:
        number = len(known)
        self._known = array("Q", known)
        self._table = array("Q", parts)
        self._table.extend(self._known)
        self._table.frombytes(bytes(8 * number))
        self._behind = slice(3 * number, 4 * number)
        self._results = Struct(f"{number}Q{number}d")
        self._function = native.few if sum(parts[1::3]) <= _SHORT else native.many
        self._arguments = self._table.buffer_info()[0], number, native.tables_at

    def move(self, addresses: Iterable[int]) -> None:
        """Read other memory from now on, as many bytes of each part as before."""
        self._table[: self._behind.start : 3] = array("Q", addresses)

    def read(self) -> tuple[list[int], list[float]]:
        """Return N sums modulo 2^64, and N sums of squares, 0 where they are not wanted."""
        self._table[self._behind] = self._known
        self._function(*self._arguments)
        number = len(self._known)
        results = self._results.unpack_from(self._table, 24 * number)
        return list(results[:number]), list(results[number:])


def plain_sum(pieces: Iterable[Tensor], device: torch.device) -> int | Tensor:
    """Return the same as :func:`sum_words`, in torch."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    size = chunk_bytes(device)
    row = 0
    for piece in pieces:
        whole = piece.nbytes // ROW_BYTES * ROW_BYTES
        as_bytes = piece.view(torch.uint8)
        for start in range(0, whole, size):
            chunk = as_bytes[start : min(start + size, whole)]
            _add_rows(_words(chunk), row, total)
            row += len(chunk) // ROW_BYTES
        if whole < len(as_bytes):
            padded = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=device)
            padded[: len(as_bytes) - whole] = as_bytes[whole:]
            _add_rows(_words(padded), row, total)
    return int(total) % _MODULUS if device.type == "cpu" else total


def _words(chunk: Tensor) -> Tensor:
    """Return bytes of whole rows as int64 ``[R, ROW]``; copied only if their address is odd."""
    if chunk.data_ptr() % 8 or chunk.storage_offset() % 8:
        chunk = chunk.clone()
    return chunk.view(torch.int64).view(-1, ROW)


def _add_rows(words: Tensor, row: int, total: Tensor) -> None:
    """Add rows, none of which lies in another block of multipliers than the first."""
    tables = tables_on(words.device)
    block, first = divmod(row, _NUM_MULTIPLIERS)
    if words.device.type == "cpu":
        upper = torch.bitwise_right_shift(words, 32, out=_room()[: len(words)])
        sums = torch.mv(words, tables.first).add_(torch.mv(upper, tables.second))
    else:  # there are no products of integer matrices
        upper = torch.bitwise_right_shift(words, 32)
        sums = torch.mul(words, tables.first).addcmul_(upper, tables.second).sum(1)
    sums.mul_(tables.multipliers[first : first + len(sums)])
    total.add_(sums.sum(), alpha=signed(block_factor(block)))


def _room() -> Tensor:
    """Return scratch space on the CPU, ``[R, ROW]``: for each thread its own."""
    if not hasattr(_scratch, "words"):
        with torch.inference_mode(False):
            _scratch.words = torch.empty(
                CHUNK_BYTES // ROW_BYTES, ROW, dtype=torch.int64, device="cpu"
            )
    room: Tensor = _scratch.words
    return room


class _Tables(NamedTuple):
    """Keys and multipliers as int64 tensors on a device."""

    first: Tensor
    second: Tensor
    multipliers: Tensor


@functools.cache
def tables_on(device: torch.device) -> _Tables:
    """Return keys and multipliers on a device."""
    arrays = (*_keys(), _multipliers())
    with torch.inference_mode(False):
        return _Tables(*(torch.from_numpy(array.view(np.int64)).to(device) for array in arrays))


def _keys() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    keys = _mixed(2 * ROW, seed=1) | np.uint64(1)
    return keys[:ROW], keys[ROW:]


def _multipliers() -> NDArray[np.uint64]:
    return _mixed(_NUM_MULTIPLIERS, seed=2) | np.uint64(1)


@functools.lru_cache(maxsize=64)
def block_factor(block: int) -> int:
    """Return the factor on the multipliers of a block of rows."""
    return pow(_BLOCK_FACTOR, block, _MODULUS)


def _mixed(count: int, seed: int) -> NDArray[np.uint64]:
    """Return pseudo-random numbers, the same on every machine (Steele and others, SplitMix64)."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 40)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
