"""Any gradient as flat, contiguous parts, copying no more than a part at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.errors import UnsupportedError

_CPU_ELEMENTS = 1 << 18
_ACCELERATOR_ELEMENTS = 1 << 22


def flat_parts(gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield position and elements of parts that make up a gradient in row-major order.

    A contiguous gradient is one part, without a copy. Of one with another layout in memory, or a
    sparse one, pieces of bounded size are copied one after the other.

    Args:
        gradient: Any shape and layout, any floating or complex dtype; a DTensor counts as its
            local part.

    Yields:
        Position of the first element, and the elements ``[n]``, n > 0.

    Raises:
        UnsupportedError: The training has freed the gradient's memory.
    """
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.layout == torch.strided:
        check_memory(gradient)
    limit = _CPU_ELEMENTS if gradient.device.type == "cpu" else _ACCELERATOR_ELEMENTS
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return _parts(gradient, limit, 0)


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


def _parts(tensor: Tensor, limit: int, position: int) -> Iterator[tuple[int, Tensor]]:
    size = tensor.numel()
    if size == 0:
        return
    strided = tensor.layout == torch.strided
    if strided and tensor.is_contiguous():
        yield position, tensor.view(-1)
    elif size <= limit or tensor.dim() == 0:
        yield position, (tensor if strided else tensor.to_dense()).reshape(-1).contiguous()
    else:
        inner = size // len(tensor)
        step = max(1, limit // inner)
        for first in range(0, len(tensor), step):
            count = min(step, len(tensor) - first)
            yield from _parts(_narrow(tensor, first, count), limit, position + first * inner)


def _narrow(tensor: Tensor, first: int, count: int) -> Tensor:
    """Return some of a tensor's first dimension; without that dimension if it is one of them."""
    if tensor.layout != torch.strided:
        return tensor.narrow_copy(0, first, count).to_dense()
    part = tensor.narrow(0, first, count)
    return part[0] if count == 1 and part.dim() > 1 else part
