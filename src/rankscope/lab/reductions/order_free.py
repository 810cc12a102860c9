"""A reduction for DDP that is independent of order: the same bits for any number of workers.

Every micro-batch's gradient enters an :class:`~rankscope.lab.reductions.accumulator.Accumulator` by
itself, as soon as it exists, and ``.grad`` is cleared. So the floating-point additions of gradient
accumulation, whose number depends on how many micro-batches a worker has, never happen. The
synchronising backward pass then adds all workers' accumulators, whose sums have no order either.

Two other things must not depend on the number of workers: the computation of one micro-batch (its
size, the kernels, the number of threads), and the loss. A loss that is weighted per micro-batch,
such as ``mean loss · tokens of the micro-batch / tokens of the global batch``, goes with
``average="sum"``. The mean over workers of losses that are divided by the number of micro-batches
per worker goes with ``average="workers"``, as in plain DDP; the bits are then the same for all
numbers of workers that are powers of two, but for elements below 2^-45 (3e-14).
"""

from functools import partial
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from rankscope.errors import UnsupportedError, UsageError
from rankscope.lab.reductions.accumulator import DTYPES, Accumulator
from rankscope.lab.reductions.fixed_order import (
    BucketMeans,
    BucketReduction,
    obstacle,
    try_all_to_all,
)
from rankscope.lab.reductions.reduction import Arena, DigitSums, Exchange
from rankscope.wrappers.calls import ModuleHook
from rankscope.wrappers.parts import MicroBatchStream, streams
from rankscope.wrappers.passes import BackwardEnd, in_backward, tensors_in

Average = Literal["workers", "sum"]

MAX_WORKERS = 2048
_LOOKED_AT = 64  # elements of each parameter that show whether a gradient was cleared


def order_free(model: nn.Module, *, average: Average = "workers") -> None:
    """Reduce a DDP model's gradients independently of any order from now on.

    The reduced gradient has the same bits for 1, 2, 4, ... workers on the same micro-batches, for
    any order of micro-batches, of workers, and of arrival. Every rank calls it once, after
    wrapping the model and before the first backward pass; all micro-batches of a step but the
    last run under ``model.no_sync()``, and gradients are cleared between steps.

    Each gradient element enters the sum exactly if it is 2^-45 (3e-14) or more, and smaller ones
    with an error of at most 2^-69; the sum is rounded once, to the dtype of the parameter. If a
    parameter's gradient holds NaN or infinities, or elements beyond 2^40, all of it becomes NaN or
    infinite, so that a gradient scaler skips the step.

    Costs: 16 bytes per parameter, and while the largest bucket travels 16 bytes per element of
    it. Each worker sends 20 bytes per parameter times (W − 1) / W, against 8 of an all-reduce in
    float32. Between the micro-batches of a step, ``.grad`` is zero.

    Args:
        model: The model in ``DistributedDataParallel``.
        average: ``"workers"``: the sum over all micro-batches is divided by the number of workers,
            as DDP does. ``"sum"``: it is not divided, for a loss that each micro-batch weights by
            its share of the global batch.

    Raises:
        UnsupportedError: The model's gradients cannot be reduced so; the message is the reason.
        UsageError: ``average`` is something else.
    """
    if average not in get_args(Average):
        known = ", ".join(map(repr, get_args(Average)))
        raise UsageError(f"average must be one of {known}, got {average!r}")
    if not isinstance(model, DistributedDataParallel):
        _refuse(f"a model in DistributedDataParallel, got {type(model).__name__}")
    wrong = _obstacle(model) or try_all_to_all(model.process_group, model.device)
    if wrong is not None:
        _refuse(wrong)
    OrderFree(model, average).register(model)


class OrderFree(BucketReduction):
    """The state of an order-free reduction of a model that nothing stands in the way of."""

    def __init__(self, model: DistributedDataParallel, average: Average) -> None:
        super().__init__(model, DigitSums(model.process_group, model.device))
        self._average = average
        self._gradients = {id(p): _Gradient(p) for p in _reduced(model)}
        self._keeps = not model.gradient_as_bucket_view  # .grad between micro-batches
        self._micro_batches = MicroBatchStream(float(self._group.size() if average == "sum" else 1))
        self._divisor = 1
        self._backward = BackwardEnd(self._begin_pass, lambda: None, lambda work: work())
        self._first: _Gradient | None = None  # whose gradient is just being taken

    def register(self, model: DistributedDataParallel) -> None:
        """Take the model's gradients from now on."""
        for gradient in self._gradients.values():
            parameter = gradient.parameter
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # also of one that is frozen now and trained later
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._take, gradient)
            )
            parameter.requires_grad_(trained)
        ModuleHook(model, self._before_forward, self._after_forward)
        model.register_comm_hook(self, reduce_bucket)
        streams[model] = self._micro_batches

    # The gradient of one micro-batch -----------------------------------------------------------

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._backward.begin()

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Notice a backward pass as soon as it begins, before passes of checkpoints inside it."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: self._backward.notice()
                )

    def _take(self, this: "_Gradient", parameter: Tensor) -> None:
        """Move a parameter's gradient into its accumulator; called as soon as it exists."""
        gradient = parameter.grad
        if gradient is None:
            return
        if torch.is_grad_enabled():
            _refuse("a backward pass without create_graph=True, got one with it")
        if gradient.is_sparse:
            _refuse("dense gradients, got a sparse one")
        self._first = this
        self._backward.notice()
        self._first = None
        self._micro_batches.pass_on(parameter, gradient)
        this.deposit(gradient)
        if self._keeps:
            gradient.zero_()
        else:  # maybe in DDP's bucket, where others' changes could not be distinguished
            parameter.grad = gradient = torch.zeros_like(gradient)
        this.remember(gradient)

    def _begin_pass(self) -> None:
        """At the beginning of a backward pass, forget the sums that the training has cleared."""
        self._abandon()  # the rest of a pass that raised
        carried_over = []
        for this in self._gradients.values():
            gradient = this.parameter.grad
            if not this.is_untouched(additions=1 if this is self._first else 0):
                this.forget()
                if gradient is not None and this is not self._first:
                    carried_over.append(gradient.detach().reshape(-1)[:_LOOKED_AT].any())
        # Outside of a backward pass, this rank has no data in join().
        if in_backward() and carried_over and torch.stack(carried_over).any():
            raise UnsupportedError(
                "order_free expected gradients that are cleared after each synchronising backward "
                "pass, got some that are not zero; call zero_grad after each optimizer step, and "
                "put all micro-batches of a step but the last under model.no_sync()"
            )

    # The reduction -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._backward.running:  # none of this rank's parameters took part
            self._begin_pass()
        self._divisor = self._count_workers() if self._average == "workers" else 1

    def _start(self, bucket: dist.GradBucket) -> Exchange:  # type: ignore[name-defined]
        """Begin to add up a bucket's accumulators; DDP's copies in the bucket do not count."""
        members = [self._gradients[id(parameter)] for parameter in bucket.parameters()]
        exchange: Exchange = self._reduction.start(
            bucket.buffer(), self._arena(members), self._divisor
        )
        for member in members:
            member.forget()
        return exchange

    def _arena(self, members: list["_Gradient"]) -> Arena:
        """Return the digits of a bucket's parameters side by side; moved there if they are not."""
        sums = [member.sum for member in members]
        arena = members[0].arena
        if arena is None or arena.sums != sums:
            arena = Arena(sums, self._group.size())
            for member in members:
                member.arena = arena
        return arena


class _Gradient:
    """A parameter's gradient while its micro-batches are accumulated."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.sum = Accumulator.zeros(parameter.numel(), parameter.device)
        self.arena: Arena | None = None
        self._order = _memory_order(parameter)
        self._left: Tensor | None = None  # .grad after the last micro-batch
        self._version = 0

    def deposit(self, gradient: Tensor) -> None:
        """Add a micro-batch's gradient, in the order in which DDP's bucket holds its elements."""
        self.sum.deposit(gradient.permute(self._order))

    def forget(self) -> None:
        """Forget all micro-batches so far."""
        self.sum.clear()
        self._left = None

    def remember(self, gradient: Tensor) -> None:
        """Note the zeros in ``.grad``, to which the next micro-batch is added."""
        self._left = gradient
        self._version = gradient._version

    def is_untouched(self, additions: int) -> bool:
        """Return whether nothing but so many additions has touched ``.grad`` since."""
        gradient = self.parameter.grad
        return (
            gradient is not None
            and gradient is self._left
            and gradient._version == self._version + additions
        )


def _memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's dimensions as they follow in memory, if it lies there without gaps."""
    dims = range(parameter.dim())
    strides = parameter.stride()
    order = tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if parameter.permute(order).is_contiguous() else tuple(dims)


def reduce_bucket(state: OrderFree, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Reduce a bucket: the function that DDP gets."""
    return state.reduce(bucket)


def _obstacle(model: DistributedDataParallel) -> str | None:
    """Return expectation and fact, as a part of a sentence; None if nothing is in the way."""
    for _, state in getattr(model, "_comm_hooks", ()):
        if isinstance(state, (BucketMeans, OrderFree)):
            name = "order_free" if isinstance(state, OrderFree) else "fixed_order"
            return f"a model that nothing else reduces, got one under {name}"
    if model.mixed_precision is not None:
        return "DDP without a precision of its own, got mixed_precision"
    if model.process_group.size() > MAX_WORKERS:
        return f"at most {MAX_WORKERS} workers, got {model.process_group.size()}"
    wrong = obstacle(model)
    if wrong is not None:
        return wrong
    if not hasattr(model.reducer, "_get_zeros_like_grad_buckets"):
        return f"DDP's list of its buckets, which torch {torch.__version__} does not give"
    strange = {str(p.dtype) for p in _reduced(model) if p.dtype not in DTYPES}
    if strange:
        return f"parameters of {', '.join(map(str, DTYPES))}, got {', '.join(sorted(strange))}"
    return None


def _refuse(expected_and_got: str) -> NoReturn:
    raise UnsupportedError(
        f"order_free needs {expected_and_got}: leave order_free out, or change that"
    )


def _reduced(model: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters in DDP's buckets: those that were trained when it was made."""
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [parameter for bucket in buckets for parameter in bucket.parameters()]
