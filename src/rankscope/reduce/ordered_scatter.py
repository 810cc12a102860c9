"""A reduce-scatter for FSDP2 whose order of summation is fixed: all-to-all, then a local sum.

FSDP2 reduces the gradients of a module with one reduce-scatter, and lets another take its place.
Here each worker gets its shard of *every* worker's gradient, which are the bytes of a
reduce-scatter, and adds them up in rank order, as
:class:`~rankscope.reduce.reduction.OrderedMean` does for DDP.

Legend of shapes: W workers of a process group, N elements of a shard.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.reduce.reduction import add_up

_NO_TIMEOUT = datetime.timedelta(0)


class OrderedReduceScatter:
    """Takes the place of FSDP2's reduce-scatter, see ``FSDPModule.set_custom_reduce_scatter``.

    The sum is taken in fp32 (in float64 for float64 gradients), divided as FSDP2 asks, and rounded
    once to the dtype of the reduction.

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
            ValueError: FSDP2 asked for another operation.
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
        values_WN, self._values_WN = self._values_WN, None
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
