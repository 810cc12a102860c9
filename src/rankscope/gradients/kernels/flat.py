"""Any gradient as flat, contiguous parts, copying no more than a part at a time."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.errors import UnsupportedError

_CPU_ELEMENTS = 1 << 18
_ACCELERATOR_ELEMENTS = 1 << 22
_CPU_GAP = 1 << 14  # zeros that cost less than another part


def flat_parts(gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield position and elements ``[n > 0]`` of parts that make up a gradient in row-major order.

    A contiguous gradient is one part, without a copy. Of one with other strides, or a sparse one,
    pieces of bounded size are copied one after the other; other layouts as a whole. Long stretches
    of a sparse gradient that hold nothing are left out: they are zeros. A DTensor counts as its
    local part. A gradient whose memory the training has freed is an UnsupportedError.
    """
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.layout == torch.strided:
        check_memory(gradient)
    limit = _CPU_ELEMENTS if gradient.device.type == "cpu" else _ACCELERATOR_ELEMENTS
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return _parts(gradient, limit)


def check_memory(tensor: Tensor) -> None:
    """Raise an UnsupportedError unless the memory of a strided tensor is there to be read."""
    if not has_memory(tensor):
        raise UnsupportedError(
            f"expected a gradient that can be read, got one of shape {tuple(tensor.shape)} whose "
            "memory has been freed: something in the training takes gradients away too early"
        )


def has_memory(tensor: Tensor) -> bool:
    """Return whether all elements of a strided tensor lie inside of its memory."""
    length = tensor.numel()
    if length and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in steps)
    needed = (tensor.storage_offset() + length) * tensor.itemsize
    return not length or tensor.untyped_storage().nbytes() >= needed


def is_flat(tensor: Tensor) -> bool:
    """Return whether the elements of a strided tensor lie in memory as they are, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def blocks_of(tensor: Tensor, start: int, stop: int, limit: int) -> Iterator[Tensor]:
    """Yield blocks that, one after the other, are elements ``[start, stop)`` of a strided tensor.

    One that is not contiguous has at most ``limit`` elements.
    """
    length = tensor.numel()
    if start >= stop:
        return
    if is_flat(tensor):
        yield tensor.view(-1)[start:stop]
    elif stop - start == length <= limit:
        yield tensor
    elif tensor.dim() == 1:
        yield from (tensor[i : min(i + limit, stop)] for i in range(start, stop, limit))
    else:
        inner = length // len(tensor)
        row = start // inner
        while row * inner < stop:
            first = start - row * inner
            last = stop - row * inner
            count = min(limit, last) // inner
            if first > 0 or count == 0:  # a part of a row, or a long one
                yield from blocks_of(tensor[row], max(first, 0), min(last, inner), limit)
                row += 1
            else:
                yield tensor[row : row + count]
                row += count


def _parts(tensor: Tensor, limit: int) -> Iterator[tuple[int, Tensor]]:
    size = tensor.numel()
    position = 0
    if tensor.layout == torch.strided:
        for block in blocks_of(tensor, 0, size, limit):
            yield position, block.reshape(-1).contiguous()
            position += block.numel()
    elif tensor.layout == torch.sparse_coo and tensor.sparse_dim() and size > limit:
        yield from _sparse_parts(tensor, limit)
    elif size:
        yield 0, tensor.to_dense().reshape(-1)


def _sparse_parts(tensor: Tensor, limit: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows that hold something, with those between them where they are few."""
    indices = tensor._indices()
    values = tensor._values()
    check_memory(values)
    inner = tensor.numel() // len(tensor)
    gap = _CPU_GAP if tensor.is_cpu else limit
    if not tensor.is_coalesced():
        order = indices[0].argsort(stable=True)
        indices = indices[:, order]
        values = values[order]
    rows = indices[0].cpu().numpy()
    far = (np.flatnonzero(np.diff(rows) * inner > gap) + 1).tolist()
    for first, last in pairwise([0, *far, len(rows)] if len(rows) else [0]):
        begin = first
        while begin < last:
            row = int(rows[begin])
            end = begin + int(rows[begin:last].searchsorted(row + max(1, limit // inner)))
            count = int(rows[end - 1]) - row + 1
            yield (
                row * inner,
                _dense(indices[:, begin:end], values[begin:end], row, (count, *tensor.shape[1:])),
            )
            begin = end


def _dense(indices: Tensor, values: Tensor, row: int, shape: tuple[int, ...]) -> Tensor:
    """Return the elements of some rows, the first of which is ``row``."""
    if shape[0] == 1 == len(values) and len(indices) == 1:
        return values.reshape(-1)
    places = indices.clone()
    places[0] -= row
    part = torch.sparse_coo_tensor(places, values, shape, check_invariants=False)
    return part.to_dense().view(-1)
