"""Reads many parts of tensors at one moment of a step: their digests, and squared norms of some.

What lies in the host's memory is read by one call, what lies on an accelerator by one launch,
however many parts there are. Anything else (sparse, not contiguous, of a subclass) is read by
itself.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.capture.digest import PendingDigest, digest_bits, flat_pieces, word_of
from rankscope.capture.host import HostCopy
from rankscope.capture.kernels.bits import NUMBERS, native_sum
from rankscope.capture.kernels.flat import check_memory
from rankscope.capture.kernels.many import DeviceParts, Launched, device_reader

if TYPE_CHECKING:
    from array import array

_MASK = (1 << 64) - 1
_ORDINARY = (Tensor, torch.nn.Parameter)

_kinds: dict[tuple[torch.dtype, int], tuple[int, int, int]] = {}


class Reading:
    """Parts of tensors that are to be read at one moment, each with a number of its own, from 0."""

    __slots__ = ("_bytes", "_devices", "_kept", "_known", "_native", "_odd", "_parts", "_squares")

    def __init__(self) -> None:
        self._native = native_sum()
        self._known: list[int] = []
        self._kept: list[Tensor] = []  # until they are read; some are made when they are asked for
        self._parts: list[int] = []  # on the host: address, bytes, and what they hold
        self._bytes = 0
        self._devices: dict[torch.device, DeviceParts] = {}
        self._odd: list[tuple[int, PendingDigest]] = []
        self._squares: list[tuple[int, float | Tensor]] = []

    def __len__(self) -> int:
        return len(self._known)

    def add(
        self, tensor: Tensor, start: int = 0, stop: int | None = None, *, norm: bool = False
    ) -> None:
        """Add elements ``[start, stop)`` of a tensor, clipped to it; see ``digest_tensor``.

        Nothing is added when it raises, as it may with tensors of unknown kinds.

        Args:
            tensor: Any; what it holds when :meth:`begin` is called counts.
            start: First element.
            stop: The element after the last; None for all.
            norm: Whether to add up its squares; of a sparse tensor, those of all its values.
        """
        if type(tensor) is not Tensor and isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if not _lies_in_memory(tensor):
            self._add_odd(tensor, start, stop, norm=norm)
            return
        length, dtype, address = tensor.numel(), tensor.dtype, tensor.data_ptr()
        if start or stop is not None:
            stop = length if stop is None else min(stop, length)
            start = min(start, stop)
            length, address = stop - start, address + start * dtype.itemsize
        self._kept.append(tensor)
        known, size, numbers = _kinds.get((dtype, length)) or _learn(dtype, length)
        if tensor.is_cpu and self._native is not None:
            self._parts += (address, size, numbers if norm else 0)
            self._bytes += size
        else:
            device = tensor.device
            reader = device_reader(device)
            if reader is None or (norm and not numbers):
                self._add_odd(tensor, start, stop, norm=norm)
                return
            parts = self._devices.setdefault(device, DeviceParts(reader))
            parts.add(len(self._known), address, size, numbers, norm=norm)
            self._parts += (0, 0, 0)
        self._known.append(known)

    def add_word(self, word: int) -> None:
        """Add a digest that is known."""
        self._known.append(word)
        self._parts += (0, 0, 0)

    def add_unreadable(self, word: int) -> None:
        """Add a digest that stands for what cannot be read; its sum of squares is unknown."""
        self._squares.append((len(self._known), math.nan))
        self.add_word(word)

    def forget(self, length: int) -> None:
        """Forget what was added after the first so many; only words may be added afterwards."""
        del self._known[length:], self._parts[3 * length :]
        self._bytes = sum(self._parts[1::3])
        for parts in self._devices.values():
            parts.forget(length)
        self._odd = [odd for odd in self._odd if odd[0] < length]
        self._squares = [square for square in self._squares if square[0] < length]

    def begin(self) -> "PendingReading":
        """Read; nothing waits for a device."""
        sums = None
        if self._bytes and self._native is not None:
            sums = self._native.many(self._parts, self._bytes)
        launched = [parts.launch() for parts in self._devices.values()] if self._devices else ()
        return PendingReading(self._known, sums, launched, self._odd, self._squares)

    def _add_odd(self, tensor: Tensor, start: int, stop: int | None, *, norm: bool) -> None:
        digest = digest_bits(tensor, start, stop)
        number = len(self._known)
        if norm:
            squares = list(_squares(tensor, start, stop))
            self._squares += [(number, square) for square in squares]
        if digest.pending:
            self._odd.append((number, digest))
        self.add_word(digest.known & _MASK)


class PendingReading:
    """What was read, part of which may still be computed on devices. N parts.

    Args:
        known: What the host knows of the digests.
        sums: What the host has read, see :meth:`NativeSum.many`; None for nothing.
        launched: What devices compute of whole sets of parts.
        odd: What they compute of single digests, with the part's number.
        squares: Sums of squares of single parts, with its number.
    """

    __slots__ = ("_arrived", "_known", "_launched", "_read", "_squares", "_sums", "_terms")

    def __init__(
        self,
        known: list[int],
        sums: "array[int] | None",
        launched: Sequence[Launched],
        odd: list[tuple[int, PendingDigest]],
        squares: list[tuple[int, float | Tensor]],
    ) -> None:
        self._known, self._sums, self._launched = known, sums, launched
        self._read: tuple[list[int], list[float]] | None = None
        self._squares: list[tuple[int, float]] = []
        self._terms: dict[torch.device, list[tuple[int, int | None]]] = {}
        self._arrived: dict[torch.device, HostCopy] = {}
        if odd or squares:
            self._begin_to_copy(odd, squares)

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        launched = all(each.ready for each in self._launched)
        return launched and all(copy.ready for copy in self._arrived.values())

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the devices; return N digests below 2^64, and N sums of squares."""
        if self._read is None:
            self._read = self._combined()
        return self._read

    def _combined(self) -> tuple[list[int], list[float]]:
        digests, number = self._known, len(self._known)
        squares = [0.0] * number
        if self._sums is not None:
            bits = memoryview(self._sums).cast("B")
            sums = bits[24 * number : 32 * number].cast("Q").tolist()
            digests = [known + part & _MASK for known, part in zip(digests, sums, strict=True)]
            squares[:] = bits[32 * number :].cast("d")
        for each in self._launched:
            each.add_to(digests, squares)
        for i, square in self._squares:
            squares[i] += square
        for device, terms in self._terms.items():
            arrived = self._arrived[device].numpy()
            for (i, factor), value in zip(terms, arrived, strict=True):
                if factor is None:
                    squares[i] += float(value.view(np.float64))
                else:
                    digests[i] = digests[i] + factor * int(value) & _MASK
        return digests, squares

    def _begin_to_copy(
        self, odd: list[tuple[int, PendingDigest]], squares: list[tuple[int, float | Tensor]]
    ) -> None:
        tensors: dict[torch.device, list[Tensor]] = defaultdict(list)
        terms: dict[torch.device, list[tuple[int, int | None]]] = defaultdict(list)
        for number, digest in odd:
            for factor, tensor in digest.pending:
                tensors[tensor.device].append(tensor)
                terms[tensor.device].append((number, factor))
        for number, square in squares:
            if isinstance(square, Tensor):
                tensors[square.device].append(square.double().view(torch.int64))
                terms[square.device].append((number, None))
            else:
                self._squares.append((number, square))
        self._terms = dict(terms)
        self._arrived = {d: HostCopy(torch.stack(each), own=True) for d, each in tensors.items()}


def prepare(device: torch.device) -> None:
    """Compile now what reads on a device; later, a backward pass would have to wait for it."""
    native_sum()
    if device.type != "cpu":
        device_reader(device)


def _learn(dtype: torch.dtype, length: int) -> tuple[int, int, int]:
    """Return the constant part of a digest, the bytes, and what they are called in C."""
    known = (word_of(f"{dtype} {length}"), length * dtype.itemsize, NUMBERS.get(dtype, 0))
    if len(_kinds) > 1 << 14:
        _kinds.clear()
    _kinds[dtype, length] = known
    return known


def _lies_in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is one piece of memory, all of it there."""
    if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided:
        return False
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return False
    if not tensor.is_cpu and tensor.is_meta:
        return False
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return tensor.untyped_storage().nbytes() >= needed and not tensor.is_quantized


def _squares(tensor: Tensor, start: int, stop: int | None) -> Iterator[float | Tensor]:
    """Yield sums of squares that together are those of a part of a gradient."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
        start, stop = 0, None
    stop = tensor.numel() if stop is None else min(stop, tensor.numel())
    if start >= stop:
        return
    check_memory(tensor)
    for piece in flat_pieces(tensor, start, stop):
        flat = torch.view_as_real(piece).view(-1) if piece.is_complex() else piece
        norm = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        square = norm.double().square()
        yield float(square) if square.is_cpu else square
