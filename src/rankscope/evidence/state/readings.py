"""Digests of many parts of tensors at one moment of a step, and squared norms of some.

All parts in the host's memory are read by one call, all parts on an accelerator by one launch.
Other tensors (sparse, not contiguous, of a subclass) are read one by one.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import add, attrgetter, is_, sub
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.gradients.digest import (
    ORDINARY,
    PendingDigest,
    digest_bits,
    flat_pieces,
    lies_in_memory,
    word_of,
)
from rankscope.gradients.host import HostCopy
from rankscope.gradients.kernels.bits import NUMBERS, Parts, native_sum
from rankscope.gradients.kernels.flat import check_memory
from rankscope.gradients.kernels.many import DeviceParts, Launched, device_reader

UNREADABLE = word_of("cannot be read")
"""Stands for the digest of a tensor that cannot be read."""

_MASK = (1 << 64) - 1
_bytes_of = attrgetter("nbytes")
_dtype_of = attrgetter("dtype")
_is_on_host = attrgetter("is_cpu")

_kinds: dict[tuple[torch.dtype, int], tuple[int, int, int]] = {}


class PendingDigests:
    """Parts of tensors to read at one moment, numbered from 0."""

    __slots__ = (
        "_devices",
        "_in_memory",
        "_kept",
        "_native",
        "_parts",
        "_single",
        "_squares",
        "_words",
    )

    def __init__(self) -> None:
        self._native = native_sum()
        self._words: list[int] = []
        self._kept: list[Tensor] = []  # alive until they are read
        self._in_memory: list[int] = []  # numbers of the kept tensors' parts
        self._parts: list[int] = []  # on the host: address, bytes, number format
        self._devices: dict[torch.device, DeviceParts] = {}
        self._single: list[tuple[int, PendingDigest]] = []
        self._squares: list[tuple[int, float | Tensor]] = []

    def __len__(self) -> int:
        return len(self._words)

    def add(
        self, tensor: Tensor, start: int = 0, stop: int | None = None, *, norm: bool = False
    ) -> None:
        """Add elements ``[start, stop)`` of a tensor, as they will be when :meth:`begin` is called.

        It may raise with tensors of unknown kinds, and adds nothing then. ``norm`` adds up squares
        too; of a sparse tensor, those of all its values. See ``digest_tensor``.
        """
        if type(tensor) is not Tensor and isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if not lies_in_memory(tensor):
            self._add_single(tensor, start, stop, norm=norm)
            return
        length = tensor.numel()
        dtype = tensor.dtype
        address = tensor.data_ptr()
        if start or stop is not None:
            stop = length if stop is None else min(stop, length)
            start = min(start, stop)
            length = stop - start
            address += start * dtype.itemsize
        word, size, numbers = _kinds.get((dtype, length)) or _learn(dtype, length)
        if tensor.is_cpu and self._native is not None:
            self._parts += (address, size, numbers if norm else 0)
        else:
            device = tensor.device
            reader = device_reader(device)
            if reader is None or (norm and not numbers):
                self._add_single(tensor, start, stop, norm=norm)
                return
            parts = self._devices.setdefault(device, DeviceParts(reader))
            parts.add(len(self._words), address, size, numbers, norm=norm)
            self._parts += (0, 0, 0)
        self._kept.append(tensor)
        self._in_memory.append(len(self._words))
        self._words.append(word)

    def add_digest(self, digest: PendingDigest) -> None:
        """Add a digest that a device may still compute."""
        if digest.pending:
            self._single.append((len(self._words), digest))
        self.add_word(digest.known & _MASK)

    def add_word(self, word: int) -> None:
        """Add a digest that is known."""
        self._words.append(word)
        self._parts += (0, 0, 0)

    def add_unreadable(self) -> None:
        """Add what stands for an unreadable tensor; its sum of squares is NaN."""
        self._squares.append((len(self._words), math.nan))
        self.add_word(UNREADABLE)

    def forget(self, length: int) -> None:
        """Drop the parts after the first ``length``; only words may be added afterwards."""
        del self._words[length:], self._parts[3 * length :]
        while self._in_memory and self._in_memory[-1] >= length:
            del self._in_memory[-1], self._kept[-1]
        for parts in self._devices.values():
            parts.forget(length)
        self._single = [single for single in self._single if single[0] < length]
        self._squares = [square for square in self._squares if square[0] < length]

    def begin(self) -> "PendingReading":
        """Read; nothing waits for a device."""
        host = self._on_host()
        return self._begin(None if host is None else host.read())

    def _on_host(self) -> Parts | None:
        """Return the parts in the host's memory, if there are any."""
        if self._native is None or not any(self._parts[1::3]):
            return None
        return Parts(self._native, self._parts, self._words)

    def _begin(self, of_host: tuple[list[int], list[float]] | None) -> "PendingReading":
        if of_host is None:
            of_host = list(self._words), [0.0] * len(self._words)
        launched = [one for parts in self._devices.values() for one in parts.launch()]
        return PendingReading(*of_host, launched, self._single, self._squares)

    def _add_single(self, tensor: Tensor, start: int, stop: int | None, *, norm: bool) -> None:
        digest = digest_bits(tensor, start, stop)
        number = len(self._words)
        if norm:
            squares = list(_squares(tensor, start, stop))
            self._squares += [(number, square) for square in squares]
        self.add_digest(digest)


class CachedReading:
    """A reading that is repeated with new tensors of the same sizes and types, by address."""

    __slots__ = ("_form", "_host", "_offsets", "_pointers", "_reading", "_types")

    def __init__(self) -> None:
        self._reading: PendingDigests | None = None
        self._host: Parts | None = None
        self._form: tuple[list[int], list[bool]] = ([], [])
        self._types: list[torch.dtype] = []
        self._pointers: list[int] = []
        self._offsets: list[int] | None = None

    def learn(self, reading: PendingDigests, tensors: Sequence[Tensor | None]) -> None:
        """Cache a reading, before it begins, of tensors that all lie in memory."""
        self._reading = None
        kept = reading._kept
        plain = len(kept) == len(tensors) and all(map(is_, kept, tensors))
        if not plain or reading._single or reading._squares or any(map(Tensor.is_complex, kept)):
            return
        reading._kept = []
        self._form = _form_of(kept)
        self._types = list(map(_dtype_of, kept))
        self._pointers = list(map(Tensor.data_ptr, kept))
        self._reading = reading
        self._host = reading._on_host()
        if reading._in_memory == list(range(len(reading))) and not reading._devices:
            self._offsets = list(map(sub, reading._parts[::3], self._pointers))
        else:
            self._offsets = None

    def begin(
        self, tensors: Sequence[Any], before: "CachedReading | None" = None
    ) -> "PendingReading | None":
        """Read tensors like those of the cached reading; return None if these are others.

        ``before`` has just read the same tensors, at the addresses that have not changed since.
        """
        if self._reading is None or not ORDINARY.issuperset(map(type, tensors)):
            return None
        pointers = list(map(Tensor.data_ptr, tensors))
        found = (
            before is not None
            and before._pointers == pointers
            and before._form == self._form
            and before._reading is not None
        )
        if not found and _form_of(tensors) != self._form:
            return None
        if pointers != self._pointers:
            if self._host is None or self._offsets is None:
                return None
            if not found and not self._have_memory(tensors):
                return None
            self._pointers = pointers
            self._host.move(map(add, pointers, self._offsets))
        return self._reading._begin(None if self._host is None else self._host.read())

    def _have_memory(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors lie in the host's memory, with room for the cached sizes."""
        if not all(map(_is_on_host, tensors)) or self._types != list(map(_dtype_of, tensors)):
            return False
        sizes = self._form[0]
        rooms = [each.untyped_storage().nbytes() for each in tensors]
        if rooms == sizes:
            return True
        offsets = map(Tensor.storage_offset, tensors)
        each = zip(rooms, offsets, self._types, sizes, strict=True)
        return all(room >= offset * dtype.itemsize + size for room, offset, dtype, size in each)


class PendingReading:
    """Digests and sums of squares of N parts, some of which devices may still compute."""

    __slots__ = ("_arrived", "_digests", "_launched", "_squares", "_terms")

    def __init__(
        self,
        digests: list[int],  # digests from the host, below 2^64
        squares: list[float],  # sums of squares from the host
        launched: Sequence[Launched] = (),  # sets of parts that devices read
        single: Sequence[tuple[int, PendingDigest]] = (),  # digests on devices, by number
        single_squares: Sequence[tuple[int, float | Tensor]] = (),  # likewise
    ) -> None:
        self._digests = digests
        self._squares = squares
        self._launched = launched
        tensors: dict[torch.device, list[Tensor]] = defaultdict(list)
        terms: dict[torch.device, list[tuple[int, int | None]]] = defaultdict(list)
        for number, digest in single:
            for factor, tensor in digest.pending:
                tensors[tensor.device].append(tensor)
                terms[tensor.device].append((number, factor))
        for number, square in single_squares:
            if isinstance(square, Tensor):
                tensors[square.device].append(square.double().view(torch.int64))
                terms[square.device].append((number, None))
            else:
                squares[number] += square
        self._terms = dict(terms)
        self._arrived = {d: HostCopy(torch.stack(each), own=True) for d, each in tensors.items()}

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        launched = all(each.ready for each in self._launched)
        return launched and all(copy.ready for copy in self._arrived.values())

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the devices; return N digests below 2^64, and N sums of squares."""
        digests = self._digests
        squares = self._squares
        for each in self._launched:
            each.add_to(digests, squares)
        for device, terms in self._terms.items():
            arrived = self._arrived[device].numpy()
            for (i, factor), value in zip(terms, arrived, strict=True):
                if factor is None:
                    squares[i] += float(value.view(np.float64))
                else:
                    digests[i] = digests[i] + factor * int(value) & _MASK
        self._launched = ()
        self._terms = {}
        return digests, squares


def prepare(device: torch.device) -> None:
    """Compile the kernels of a device now, so that no backward pass waits for it."""
    native_sum()
    if device.type != "cpu":
        device_reader(device)


def _learn(dtype: torch.dtype, length: int) -> tuple[int, int, int]:
    """Return the constant part of a digest, the bytes, and their number format in C."""
    entry = (word_of(f"{dtype} {length}"), length * dtype.itemsize, NUMBERS.get(dtype, 0))
    if len(_kinds) > 1 << 14:
        _kinds.clear()
    _kinds[dtype, length] = entry
    return entry


def _form_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
    """Return size and contiguity of each tensor, which decide how much memory is read."""
    return list(map(_bytes_of, tensors)), list(map(Tensor.is_contiguous, tensors))


def _squares(tensor: Tensor, start: int, stop: int | None) -> Iterator[float | Tensor]:
    """Yield sums of squares that add up to that of a part of a gradient."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
        start = 0
        stop = None
    stop = tensor.numel() if stop is None else min(stop, tensor.numel())
    if start >= stop:
        return
    check_memory(tensor)
    for piece in flat_pieces(tensor, start, stop):
        flat = torch.view_as_real(piece).view(-1) if piece.is_complex() else piece
        norm = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        square = norm.double().square()
        yield float(square) if square.is_cpu else square
