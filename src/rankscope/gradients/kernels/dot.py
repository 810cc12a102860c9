"""The inner product of two gradients in float64, in one pass over both."""

from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.gradients.kernels.flat import blocks_of
from rankscope.gradients.kernels.library import compiled
from rankscope.gradients.kernels.native import TYPES

Dot = Callable[[Tensor, Tensor], float | Tensor]
"""Takes two tensors of one shape; on an accelerator returns a float64 scalar, without waiting."""

_CHUNK_ELEMENTS = {"cpu": 1 << 16}  # half a megabyte in float64: stays near the core
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 21


def choose_dot(device: torch.device) -> Dot:
    """Return the fastest inner product that works on a device.

    That is a compiled one on a CPU if the package has it, else plain torch. Both copy no more than
    a chunk at a time.

    Args:
        device: Where the gradients live.
    """
    if device.type != "cpu":
        return plain_dot
    try:
        dot = NativeDot()
        check_dot(dot)
    except Exception:  # whatever it is, training goes on, a little slower
        return plain_dot
    return dot


def plain_dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner product as a float64 scalar, in plain torch.

    Args:
        one: Any shape and layout, any floating or complex dtype; complex numbers count as pairs.
        other: The same shape.
    """
    limit = _CHUNK_ELEMENTS.get(one.device.type, _CHUNK_ELEMENTS_ACCELERATOR)
    one = _real(one)
    other = _real(other)
    size = one.numel()
    spans = [(start, min(start + limit, size)) for start in range(0, size, limit)]
    parts = [
        torch.dot(_elements(one, *span).double(), _elements(other, *span).double())
        for span in spans
    ]
    return torch.stack(parts).sum() if parts else one.new_zeros((), dtype=torch.float64)


class NativeDot:
    """Reads both on one thread, without holding the interpreter's lock.

    Plain torch does the rest: other types than float32, bfloat16 and float16, two
    types, and layouts with gaps or in two orders.

    Raises:
        NoLibraryError: There is no library, or ``RANKSCOPE_NATIVE=0`` forbids it.
    """

    def __init__(self) -> None:
        self._function = compiled("dot")

    def __call__(self, one: Tensor, other: Tensor) -> float | Tensor:
        """Return the inner product; see :func:`plain_dot`."""
        kind = TYPES.get(one.dtype)
        alike = one.dtype == other.dtype and one.stride() == other.stride()
        if kind is None or not alike or not (one.is_cpu and other.is_cpu) or not _is_dense(one):
            return plain_dot(one, other)
        product: float = self._function(kind, one.data_ptr(), other.data_ptr(), one.numel())
        return product


def check_dot(dot: Dot) -> None:
    """Compare with plain torch on some numbers of each type.

    Raises:
        ArithmeticError: Their results differ by more than rounding.
    """
    for dtype in TYPES:
        places = torch.arange(1031, dtype=torch.float32, device="cpu")
        one = places.mul(0.7).sin_().to(dtype)
        other = places.mul(0.3).cos_().add_(0.5).to(dtype)
        error = abs(float(dot(one, other)) - float(plain_dot(one, other)))
        if not error <= 1e-9:
            raise ArithmeticError(f"the native inner product errs by {error} on {dtype}")


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in whatever order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return elements ``[start, stop)`` in row-major order; copied only where they lie apart."""
    parts = [block.reshape(-1) for block in blocks_of(tensor, start, stop, stop - start)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
