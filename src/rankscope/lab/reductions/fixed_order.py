"""A reduction whose order of summation is fixed, for a model under DDP or FSDP2.

FSDP2 reduces the gradients of a module with one reduce-scatter, and lets another take its place:
:class:`OrderedReduceScatter`. Under DDP an
:class:`~rankscope.lab.reductions.reduction.OrderedMean` takes the place of the all-reduce, in a
communication hook. A hook cannot be taken out of a DDP model again, so a model gets this one at
most once, and whoever comes later finds it there.

Legend of shapes: W workers of a process group, N elements of a shard.
"""

import datetime
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from rankscope.errors import UnsupportedError
from rankscope.lab.reductions.reduction import Exchange, OrderedMean, add_up
from rankscope.wrappers.fsdp2_model import ParameterGroup, is_fsdp2, parameter_groups
from rankscope.wrappers.passes import in_backward

_OWN_SCATTERS = {"DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter"}
_MAX_REPLICAS = 2


def fixed_order(model: nn.Module) -> None:
    """Add up the gradients of all workers in the order of ranks, from the next backward pass on.

    The reduced gradient then is ``((g_0 + g_1) + g_2 + …) / W``, each sum in fp32 (float64 for
    float64 gradients), divided once and rounded once to the gradient's dtype: the same bits on
    every worker and in every run, whatever the bucket size, the collective's algorithm, the
    network and the order of arrival. Where the local gradients have the same bits, DDP and FSDP2
    give the same ones.

    It takes an all-to-all, a local sum and an all-gather: each worker sends ``2 (W − 1) / W`` times
    the bytes of its gradient, as in an all-reduce by ring, and needs memory for another copy of the
    largest bucket (FSDP2: of the largest module's gradient, while it is reduced). Gradients stay
    right with unused parameters, rebuilt buckets, static graphs, ``no_sync`` and ``join()``.

    Call it once the model is wrapped, at the same point of the program on every worker; a second
    call does nothing. It cannot be taken out again. A copy of a DDP model reduces as DDP does,
    until it is given to this function too.

    Under FSDP2 the divisions are FSDP2's: with fp16 gradients, or after
    ``set_force_sum_reduction_for_comms``, it divides the rounded sum, which rounds again. Two
    replicas (HSDP) are added by FSDP2's own all-reduce, since two numbers have one sum in any
    order.

    Args:
        model: What the training calls: a model in ``DistributedDataParallel``, or one to which
            ``fully_shard`` was applied; compiled or not.

    Raises:
        UnsupportedError: The gradients cannot be reduced in a fixed order; the model is left as it
            was.

    Example:
        >>> model = DistributedDataParallel(model)  # doctest: +SKIP
        >>> rankscope.fixed_order(model)  # doctest: +SKIP
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile around the wrapper
    if isinstance(inner, DistributedDataParallel):
        BucketMeans.put_into(inner)
    elif is_fsdp2(inner):
        _fix_fsdp2(inner)
    else:
        _refuse(
            f"a model in DistributedDataParallel or under fully_shard, got {type(inner).__name__}"
        )


def _fix_fsdp2(model: nn.Module) -> None:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups_of = {module: parameter_groups(module) for module in modules}
    if any(parameter.is_complex() for parameter in model.parameters()):
        _refuse("real gradients, got complex parameters")
    tried: set[tuple[int, ...]] = set()
    for groups in groups_of.values():
        if len(groups) > 1:
            _refuse("modules with one mesh each, got one whose parameters differ in theirs")
        for group in groups:
            _check(group, tried)
    for module, groups in groups_of.items():
        for group in groups:
            if not isinstance(group.reduce_scatter, OrderedReduceScatter):
                module.set_custom_reduce_scatter(
                    OrderedReduceScatter(group.reduce_scatter)  # type: ignore[arg-type]
                )


def _check(group: ParameterGroup, tried: set[tuple[int, ...]]) -> None:
    scatter = type(group.reduce_scatter)
    if scatter is not OrderedReduceScatter and scatter.__name__ not in _OWN_SCATTERS:
        _refuse(f"FSDP2's own reduce-scatter, got {scatter.__name__}")
    if group.num_copies > _MAX_REPLICAS:
        _refuse(
            f"at most {_MAX_REPLICAS} replicas of each shard, got {group.num_copies}, which FSDP2 "
            "adds up in an all-reduce of its own"
        )
    if group.shard_group is not None and group.shard_size > 1 and group.ranks not in tried:
        tried.add(group.ranks)
        wrong = try_all_to_all(group.shard_group, group.device)
        if wrong is not None:
            _refuse(wrong)


def _refuse(expected_and_got: str) -> NoReturn:
    raise UnsupportedError(
        f"fixed_order needs {expected_and_got}: leave the reduction as it is, or change that"
    )


_NO_TIMEOUT = datetime.timedelta(0)


class OrderedReduceScatter:
    """Takes the place of FSDP2's reduce-scatter, see ``FSDPModule.set_custom_reduce_scatter``.

    The sum is taken in fp32 (in float64 for float64 gradients), divided by FSDP2's factor, and
    rounded once to the dtype of the reduction. What was there before still allocates the memory.
    """

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for a gradient that is to be reduced."""
        memory: Tensor = self._replaced.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` ``[W N]``, this worker's values of all shards, to its own one.

        ``op`` is ``SUM``, ``AVG`` or ``PREMUL_SUM``, whose factor multiplies the sum. With
        ``async_op`` it returns at once; the caller waits for what is returned.
        """
        divisor = _divisor(op, group.size())
        values_WN = input_tensor.new_empty(group.size(), output_tensor.numel())
        collected = dist.all_to_all_single(
            values_WN.view(-1), input_tensor, group=group, async_op=True
        )
        work = _Sum(collected, values_WN, output_tensor, divisor)
        if async_op:
            return work
        work.wait()
        return None


class _Sum(dist.Work):
    """A reduction under way; on an accelerator, streams wait for it instead of the program."""

    def __init__(
        self, collected: dist.Work, values_WN: Tensor, into: Tensor, divisor: float
    ) -> None:
        super().__init__()
        self._collected = collected
        self._values_WN: Tensor | None = values_WN
        self._into = into
        self._divisor = divisor

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the other workers' values, and add them up on the current stream."""
        if self._values_WN is None:
            return True
        values_WN = self._values_WN
        self._values_WN = None
        self._collected.wait(timeout)
        if values_WN.device.type != "cpu":
            values_WN.record_stream(torch.accelerator.current_stream(values_WN.device))
        add_up(values_WN, self._into, self._divisor)
        return True

    def is_completed(self) -> bool:
        """Return whether the sum was taken."""
        return self._values_WN is None


def _divisor(op: Any, num_workers: int) -> float:
    if op == dist.ReduceOp.AVG:
        return num_workers
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return 1 / float(factor)
    raise ValueError(f"a reduction in fixed order expected SUM, AVG or PREMUL_SUM, got {op}")


_OF_DDP = ("_comm_hooks", "_get_ddp_logging_data", "_module_parameters", "_join_config")
"""Attributes of DDP that a reduction in its place needs."""


class BucketReduction(ABC):
    """Reduces a DDP model's gradient bucket by bucket, by an ``OrderedMean`` or ``DigitSums``."""

    def __init__(self, model: DistributedDataParallel, reduction: Any) -> None:
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
            self._reduction.finish(exchange)

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
    """Averages the gradient of a DDP model in rank order, in fp32, bucket by bucket."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model, OrderedMean(model.process_group, model.device))

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the averager that was put into a model before, if any."""
        hooks = getattr(model, "_comm_hooks", ())
        return next((state for hook, state in hooks if isinstance(state, cls)), None)

    @classmethod
    def put_into(cls, model: DistributedDataParallel) -> None:
        """Average a model's buckets from now on; every worker calls it at the same point."""
        if cls.of(model) is not None:
            return
        wrong = obstacle(model) or try_all_to_all(model.process_group, model.device)
        if wrong is not None:
            _refuse(wrong)
        model._comm_hooks[:] = _hooks(model)  # without what copying has left of another model's
        model.register_comm_hook(cls(model), reduce_bucket)

    def _begin(self) -> None:
        self._reduction.divisor = self._count_workers()

    def _start(self, bucket: dist.GradBucket) -> Exchange:  # type: ignore[name-defined]
        exchange: Exchange = self._reduction.start(bucket.buffer())
        return exchange


def reduce_bucket(state: BucketMeans, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket: the function that DDP gets."""
    return state.reduce(bucket)


def obstacle(model: DistributedDataParallel) -> str | None:
    """Return expectation and fact that keep buckets from an average in rank order; None without."""
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
    """Exchange a few numbers on all workers; return the backend's error if it has no all-to-all."""
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
