"""The mean of DDP's buckets in rank order: a communication hook.

A DDP communication hook puts :class:`~rankscope.lab.reductions.reduction.OrderedMean` in the place
of the all-reduce.

A communication hook cannot be taken out of a DDP model again, so a model gets this one at most
once, and whoever comes later finds it there.

Legend of shapes: W workers.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from rankscope.lab.reductions.reduction import Exchange, OrderedExchange, OrderedMean, Reduction
from rankscope.wrappers.passes import in_backward

_OF_DDP = ("_comm_hooks", "_get_ddp_logging_data", "_module_parameters", "_join_config")
"""Attributes of DDP that a reduction in its place needs."""


class BucketReduction(ABC):
    """Reduces the gradient of a DDP model bucket by bucket: the state of a communication hook.

    Only a weak reference to the model is kept.
    """

    def __init__(self, model: DistributedDataParallel, reduction: Reduction) -> None:
        self._model = weakref.ref(model)
        self._group = model.process_group
        self._device = model.device
        self._reduction = reduction
        self._under_way: Exchange | None = None
        self._num_bytes = _log(model)["total_parameter_size_bytes"]
        self._num_bytes_missing = 0
        self._first_address = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies empty: DDP copies the hook's state with the model, but not the hook."""
        return type(None), ()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Begin to reduce a bucket's gradients; called by DDP, bucket by bucket.

        Each call first finishes the bucket before: its communication had the time in between, and
        collectives are launched in the same order everywhere whatever arrives first.
        """
        buffer = bucket.buffer()
        if self._begins_with(bucket):
            self._abandon()
            self._begin()
            self._num_bytes_missing = self._num_bytes
            self._first_address = buffer.data_ptr()
        self._finish_one()
        exchange = self._under_way = self._start(bucket)
        self._num_bytes_missing -= buffer.nbytes
        if bucket.is_last() or self._num_bytes_missing <= 0:
            self._finish_one()
            self._reduction.trim()
            self._num_bytes_missing = 0
        return exchange.result

    @abstractmethod
    def _begin(self) -> None:
        """Begin a backward pass."""

    @abstractmethod
    def _start(self, bucket: dist.GradBucket) -> Exchange:  # type: ignore[name-defined]
        """Begin to reduce a bucket."""

    @abstractmethod
    def _finish(self, exchange: Any) -> None:
        """Finish what :meth:`_start` returned."""

    def _begins_with(self, bucket: dist.GradBucket) -> bool:  # type: ignore[name-defined]
        """Return whether a bucket is the first of a backward pass.

        In the first pass of a static graph every bucket has the index 0 and none is the last, so
        that sizes have to be counted. A pass that raised before its end was reset by the user.
        """
        again = bucket.index() == 0 and bucket.buffer().data_ptr() == self._first_address
        return self._num_bytes_missing == 0 or again

    def _abandon(self) -> None:
        """Discard the rest of a pass that raised."""
        if self._under_way is not None:
            self._under_way.abandon()
            self._under_way = None
        self._num_bytes_missing = 0

    def _finish_one(self) -> None:
        exchange = self._under_way
        self._under_way = None
        if exchange is not None:
            self._finish(exchange)

    def _count_workers(self) -> int:
        """Return DDP's divisor: W, unless ``join()`` counts the workers that still train.

        A worker that has run out of data then runs the hook outside of any backward pass.
        """
        model = self._model()
        if model is None or not model._join_config.enable:
            return self._group.size()
        if getattr(model, "_divide_by_initial_world_size", True):  # known from join() on
            return self._group.size()
        count = torch.tensor(int(in_backward()), device=self._device)
        dist.all_reduce(count, group=self._group)
        return int(count)


class BucketMeans(BucketReduction):
    """Averages the gradient of a DDP model in rank order, bucket by bucket.

    Made by :meth:`put_into`. The reduced gradient is the sum over workers in rank order, in fp32,
    divided by W and rounded once: the same bits on every worker and in every run.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._mean = OrderedMean(model.process_group, model.device)
        super().__init__(model, self._mean)

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the averager that was put into a model before, if any."""
        hooks = getattr(model, "_comm_hooks", ())
        return next((state for hook, state in hooks if isinstance(state, cls)), None)

    @classmethod
    def put_into(cls, model: DistributedDataParallel, refuse: Callable[[str], NoReturn]) -> None:
        """Average a model's buckets from now on, unless that is so already.

        Every worker calls it at the same point of the program. ``refuse`` raises, given the
        expectation and the fact; see :func:`obstacle`.
        """
        if cls.of(model) is not None:
            return
        wrong = obstacle(model) or try_all_to_all(model.process_group, model.device)
        if wrong is not None:
            refuse(wrong)
        model._comm_hooks[:] = _hooks(model)  # without what copying has left of another model's
        model.register_comm_hook(cls(model), reduce_bucket)

    def _begin(self) -> None:
        self._mean.divisor = self._count_workers()

    def _start(self, bucket: dist.GradBucket) -> Exchange:  # type: ignore[name-defined]
        return self._mean.start(bucket.buffer())

    def _finish(self, exchange: OrderedExchange) -> None:
        self._mean.finish(exchange)


def reduce_bucket(state: BucketMeans, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket: the function that DDP gets."""
    return state.reduce(bucket)


def obstacle(model: DistributedDataParallel) -> str | None:
    """Return, without communication, why a model's buckets cannot be averaged in rank order.

    Returns:
        Expectation and fact, as a part of a sentence; None when nothing is in the way, or the
        buckets are averaged so already.
    """
    if BucketMeans.of(model) is not None:
        return None
    missing = [name for name in _OF_DDP if not hasattr(model, name)]
    if missing:
        return f"DDP with {' and '.join(missing)}, got that of torch {torch.__version__}"
    parameters = [p for p in model._module_parameters if p.requires_grad]
    if _hooks(model) or _log(model).get("comm_hook"):  # a built-in one is in the log only
        return "a model without a communication hook of its own, got one that has a hook"
    if getattr(model, "_use_python_reducer", False):
        return "DDP's C++ reducer, got optimize_ddp='python_reducer'"
    if getattr(model, "_delay_all_reduce_params", ()):
        return "all gradients in DDP's buckets, got delay_all_reduce_named_params"
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return "dense gradients, got an embedding with sparse=True"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "real gradients, got complex parameters"
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        return f"all parameters on one device, got {', '.join(sorted(map(str, devices)))}"
    return None


def try_all_to_all(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Exchange a few numbers; every worker of a group calls it.

    Returns:
        Expectation and the backend's error; None when it has an all-to-all.
    """
    sent = torch.zeros(group.size(), dtype=torch.float32, device=device)
    try:
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"a backend with all-to-all, and {dist.get_backend(group)} says '{error}'"
    return None


def _hooks(model: DistributedDataParallel) -> list[Any]:
    """Return a model's hooks, but for the name of ours that copying another model has left."""
    return [
        (hook, state)
        for hook, state in model._comm_hooks
        if not (hook is reduce_bucket and state is None)
    ]


def _log(model: DistributedDataParallel) -> dict[str, Any]:
    log: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return log
