"""A reduction whose order of summation is fixed, for a model under DDP or FSDP2.

An all-reduce adds up gradients in an order that depends on its algorithm, on the size of the
buffer and on where in it an element lies. So other bits come from another bucket size, another
network or another release of the library. With a fixed order they do not.

FSDP2 reduces the gradients of a module with one reduce-scatter, and lets another take its place:
:class:`OrderedReduceScatter`. Each worker gets its shard of *every* worker's gradient, which are
the bytes of a reduce-scatter, and adds them up in rank order, as
:class:`~rankscope.lab.reductions.reduction.OrderedMean` does for DDP.

Legend of shapes: W workers of a process group, N elements of a shard.
"""

import datetime
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rankscope.errors import UnsupportedError
from rankscope.lab.reductions.bucket_means import BucketMeans, try_all_to_all
from rankscope.lab.reductions.reduction import add_up
from rankscope.wrappers.fsdp2_model import ParameterGroup, is_fsdp2, parameter_groups

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
        BucketMeans.put_into(inner, _refuse)
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
    rounded once to the dtype of the reduction.

    Args:
        replaced: What was there before: it still allocates the memory for communication.
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
        """Reduce over a process group.

        Args:
            output_tensor: ``[N]``: gets this worker's shard of the result.
            input_tensor: ``[W N]``: this worker's values of all shards.
            group: The workers.
            op: ``SUM``, ``AVG`` or ``PREMUL_SUM``, whose factor multiplies the sum.
            async_op: Whether to return at once; the caller then waits for what is returned.

        Raises:
            ValueError: ``op`` is another operation.
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
