"""The inner product of a worker's own gradient with the reduced one, without a copy of either.

Without bucket views, ``parameter.grad`` holds the local gradient until the end of the backward
pass, when DDP copies the reduced one over it, parameter by parameter. For as long as DDP does
that, a dispatch mode watches torch's copies: each has the reduced gradient of a parameter as its
source, and the local one still in the tensor that it is about to fill. The copy itself is torch's
own and runs as it would, so that no bit changes, and nothing is registered with DDP.

With W workers, ``g . mean`` and the norms of both give a worker's direction against the others:

    g . (sum of the others)    =  W g . mean  -  |g|^2
    |sum of the others|^2      =  W^2 |mean|^2  -  2 W g . mean  +  |g|^2

The product is in float64, in one pass over both.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.gradients.kernels.flat import blocks_of
from rankscope.gradients.kernels.native import TYPES, compiled
from rankscope.gradients.sketch import Sketcher
from rankscope.private import available, find
from rankscope.wrappers.surroundings import has_left_modes
from rankscope.wrappers.tap import Guarded, ReadReduced, guarded
from rankscope.wrappers.untraced import untraced

_COPY = torch.ops.aten.copy_.default
_COPY_SEVERAL = find("torch.ops.aten._foreach_copy_.default")
_CHUNK_ELEMENTS = {"cpu": 1 << 16}  # half a megabyte in float64: stays near the core
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 21

Dot = Callable[[Tensor, Tensor], float | Tensor]
"""Takes two tensors of one shape; on an accelerator returns a float64 scalar, without waiting."""


class ReducedProduct:
    """Adds up the inner product while DDP copies reduced gradients back."""

    def __init__(
        self, parameters: Mapping[str, Tensor], device: torch.device, guarded: Guarded
    ) -> None:
        self._parameters = parameters
        self._dot = choose_dot(device)
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._guarded = guarded
        self._mode = _Copies(self._look)
        self._names: dict[int, str] = {}  # by the addresses of local gradients
        self._seen: set[str] = set()
        self._watched = self._disturbed = False

    def watch(self) -> None:
        """Watch copies until the pass is over. Call in a callback at the end of a backward pass.

        Nothing is watched inside modes of the training, which would see ours.

        DDP's own callback comes after it, and one that is queued now comes after DDP's. Where
        that one does not run, since DDP raises, the engine itself restores the thread's modes.
        """
        self._sum.zero_()
        self._seen.clear()
        self._names = {
            parameter.grad.data_ptr(): name
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and _is_plain(parameter.grad)
        }
        self._disturbed = False
        self._watched = not has_left_modes()
        if not self._watched:
            return
        torch._C._push_on_torch_dispatch_stack(self._mode)
        Variable._execution_engine.queue_callback(self._stop)

    def take(self, used: Container[str]) -> Tensor | None:
        """Return the inner product ``[]`` in float64 as a copy; None if it was not seen whole.

        Parameters that are not ``used`` have no gradient of this step: it is zero, and DDP leaves
        it alone where no worker has one.
        """
        watched, self._watched = self._watched, False
        whole = all(
            name in self._seen
            for name, parameter in self._parameters.items()
            if name in used and parameter.numel()
        )
        return self._sum.clone() if watched and whole and not self._disturbed else None

    @untraced
    def _stop(self) -> None:
        """Stop watching; not under the guard, which leaves our own mode, too, for its work."""
        height = torch._C._len_torch_dispatch_stack()
        if height and torch._C._get_dispatch_stack_at(height - 1) is self._mode:
            torch._C._pop_torch_dispatch_stack(None)

    @guarded
    def _look(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for into, reduced in pairs:
            name = self._names.get(into.data_ptr()) if _is_plain(into) else None
            if name is None:
                continue
            if name in self._seen or into.shape != reduced.shape:
                self._disturbed = True  # DDP makes no such copy
                return
            self._seen.add(name)
            self._sum += self._dot(into, reduced)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel() > 0


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``look`` with targets and sources before copies; it changes nothing, must not raise."""

    def __init__(self, look: Callable[[Iterable[tuple[Tensor, Tensor]]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else it imports the compiler at the first copy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation as it is."""
        if func is _COPY:
            self._look((args[:2],))
        elif func is _COPY_SEVERAL:
            self._look(zip(args[0], args[1], strict=False))
        return func(*args, **(kwargs or {}))


def needs_product(model: DistributedDataParallel, sketcher: Sketcher, reduced: ReadReduced) -> bool:
    """Return whether only the inner product with the reduced gradient shows directions.

    Of two workers, norms show them as well. With bucket views, DDP reduces in the memory of the
    local gradient itself.
    """
    needed = not sketcher.sketches and reduced is not ReadReduced.OFF
    if not needed or model.process_group.size() <= 2 or model.gradient_as_bucket_view:
        return False
    return available("copies")


def choose_dot(device: torch.device) -> Dot:
    """Return the fastest inner product that works on a device.

    That is a compiled one on a CPU if the package has it, else plain torch. Both copy no more than
    a chunk at a time.
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
    """Return the inner product of two tensors of one shape as a float64 scalar, in plain torch.

    They may have any layout, and any floating or complex dtype; complex numbers count as pairs.
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
    """Raise an ArithmeticError where a product differs from plain torch's by more than rounding."""
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
