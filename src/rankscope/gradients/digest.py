"""Digests of the bits of tensors, which show whether two workers hold the same.

A digest depends on every bit and on its position, on length and dtype, but not on strides, on the
device, or on the order in which it is computed. See :mod:`rankscope.gradients.kernels.bits` for its
definition; tensors are read in chunks and never copied as a whole.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankscope.gradients.kernels.bits import chunk_bytes, native_sum, signed, sum_words
from rankscope.gradients.kernels.flat import blocks_of, has_memory, is_flat

_CPU_ELEMENTS = 1 << 16  # of a tensor that is not contiguous, copied at once
_ACCELERATOR_ELEMENTS = 1 << 20
ORDINARY = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors whose methods are torch's own."""

_COMPRESSED = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}


@dataclass(slots=True)
class PendingDigest:
    """A digest modulo 2^64: the part that is on the host, and tensors that a device still computes.

    Those are int64 ``[]``; the products with their factors are to be added.
    """

    known: int = 0
    pending: list[tuple[int, Tensor]] = field(default_factory=list)

    def add(self, other: "PendingDigest", weight: int) -> None:
        """Add another digest times an odd weight."""
        self.known += weight * other.known
        if other.pending:
            self.pending += [(weight * factor, tensor) for factor, tensor in other.pending]


def digest_tensor(tensor: Tensor, *, start: int = 0, stop: int | None = None) -> Tensor:
    """Return a digest of the bits of elements ``[start, stop)``, in row-major order.

    It is an int64 ``[]`` on the tensor's device, for which nothing waits: that of a tensor that
    holds just these elements. The tensor may have any dtype, layout and strides; of a DTensor the
    local part counts. A sparse tensor is always digested as a whole, its indices and its values; so
    are the parts of a subclass that lists them. Any other tensor without bits in reach (meta
    tensors, freed storage, opaque layouts) is digested by its type, shape and dtype.

    Example:
        >>> x = torch.arange(6.0)
        >>> bool(digest_tensor(x, start=2) == digest_tensor(torch.arange(2.0, 6.0)))
        True
        >>> bool(digest_tensor(x) == digest_tensor(x.flip(0)))
        False
    """
    digest = digest_bits(tensor, start, stop)
    device = digest.pending[0][1].device if digest.pending else tensor.device
    if device.type == "meta":
        device = torch.device("cpu")
    total = torch.tensor(signed(digest.known), dtype=torch.int64, device=device)
    for factor, part in digest.pending:
        total.add_(part.to(device), alpha=signed(factor))
    return total


def digest_bits(tensor: Tensor, start: int = 0, stop: int | None = None) -> PendingDigest:
    """Return the digest of :func:`digest_tensor`, part of it pending, without waiting."""
    native = native_sum()
    if native is None or not (tensor.is_cpu and lies_in_memory(tensor)):
        return _digest_any(tensor, start, stop)
    length = tensor.numel()
    address = tensor.data_ptr()
    size = tensor.itemsize
    if start or stop is not None:
        start, stop = _clipped(tensor, start, stop)
        length = stop - start
        address += start * size
    return PendingDigest(_kind(tensor.dtype, length) + native.at(address, length * size))


@torch.no_grad()
def _digest_any(tensor: Tensor, start: int, stop: int | None) -> PendingDigest:
    if is_lazy(tensor):
        return PendingDigest(_described(tensor))
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    parts = _parts(tensor)
    if parts is not None:
        digest = PendingDigest(word_of(f"{tensor.layout} {tensor.dtype} {known_shape(tensor)}"))
        for name, part in parts:
            digest.add(digest_bits(part), word_of(name) | 1)
        return digest
    # where a subclass takes the operations, nothing is as it seems
    opaque = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or opaque)
    if not (plain and has_memory(tensor)):
        return PendingDigest(_described(tensor))
    start, stop = _clipped(tensor, start, stop)
    kind = _kind(tensor.dtype, stop - start)
    if start == stop:
        return PendingDigest(kind)
    total = sum_words(flat_pieces(tensor, start, stop), tensor.device)
    if isinstance(total, int):
        return PendingDigest(kind + total)
    return PendingDigest(kind, [(1, total)])


def _clipped(tensor: Tensor, start: int, stop: int | None) -> tuple[int, int]:
    length = tensor.numel()
    stop = length if stop is None else min(max(stop, 0), length)
    return min(max(start, 0), stop), stop


def flat_pieces(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield elements ``[start, stop)`` of a strided tensor, in row-major order.

    Pieces are contiguous ``[n > 0]``. A contiguous tensor is one piece, without a copy; any other
    is copied to one buffer of limited size again and again.
    """
    if is_flat(tensor):
        flat = tensor.view(-1)
        yield flat if stop - start == len(flat) else flat[start:stop]
        return
    size = min(chunk_bytes(tensor.device) // tensor.itemsize, stop - start)
    buffer = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    filled = 0
    limit = _CPU_ELEMENTS if tensor.device.type == "cpu" else _ACCELERATOR_ELEMENTS
    for block in blocks_of(tensor, start, stop, limit):
        flat = block.reshape(-1)
        while len(flat):
            count = min(len(flat), size - filled)
            buffer[filled : filled + count].copy_(flat[:count])
            flat = flat[count:]
            filled += count
            if filled == size:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def known_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; -1 for sizes that are not numbers, empty if it has none yet."""
    try:
        return tuple(size if type(size) is int else -1 for size in tensor.shape)
    except RuntimeError:  # its first forward pass will decide
        return ()


@functools.lru_cache(maxsize=4096)
def word_of(text: str) -> int:
    """Return a pseudo-random number below 2^64 that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, length: int) -> int:
    return word_of(f"{dtype} {length}")


def _parts(tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    """Return the strided tensors inside another kind of tensor; None for a strided one."""
    subclass: Any = tensor
    if is_traceable_wrapper_subclass(subclass):
        names, _ = subclass.__tensor_flatten__()
        return [(name, getattr(tensor, name)) for name in names]
    layout = tensor.layout
    if layout == torch.sparse_coo:
        return [("indices", tensor._indices()), ("values", tensor._values())]
    if layout not in _COMPRESSED:
        return None
    outer, inner = (getattr(tensor, name)() for name in _COMPRESSED[layout])
    return [("outer", outer), ("inner", inner), ("values", tensor.values())]


def lies_in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary one in one piece of memory, all of it there."""
    return (
        type(tensor) in ORDINARY
        and tensor.layout is torch.strided
        and is_flat(tensor)
        and (tensor.is_cpu or not tensor.is_meta)
        and has_memory(tensor)
        and not tensor.is_quantized
    )


def _described(tensor: Tensor) -> int:
    return word_of(f"{type(tensor).__name__} {tensor.dtype} {known_shape(tensor)}")
