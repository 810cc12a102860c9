"""Reductions that differ in nothing but their arithmetic, computed in one process.

W gradients lie in the rows of one tensor. What a job would do over the network, these functions do
here, partial sum by partial sum, so that two trainings can differ in the reduction alone.

Legend: M micro-batches of one global batch, W workers, P parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the workers' gradients become one.

    Attributes:
        num_workers: W, a divisor of the number of micro-batches M; each worker adds up M / W.
        arrival: Whether workers are added in an order that is drawn anew for each bucket and step,
            as they would come in; else always from the first to the last.
        dtype: Type of the buffer and of its partial sums.
        loss_scale: What the loss is multiplied by before backward, and the gradient divided by
            again, so that small values survive a 16-bit buffer; None: it is not.
    """

    num_workers: int
    arrival: bool = False
    dtype: torch.dtype = torch.float32
    loss_scale: float | None = None


class Reducer:
    """Averages gradients with one arithmetic; keeps the loss's scale and the drawn orders.

    Attributes:
        num_skipped: Steps whose scaled gradient overflowed; a scaler leaves them out.

    Args:
        arithmetic: How to add.
        bucket_elements: Elements of one bucket.
        seed: Decides the orders of arrival.
    """

    def __init__(self, arithmetic: Arithmetic, bucket_elements: int, seed: int) -> None:
        self.arithmetic = arithmetic
        self.num_skipped = 0
        self._bucket_elements = bucket_elements
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = arithmetic.loss_scale or 1.0

    def reduce(self, micro_gradients_MP: Tensor) -> Tensor | None:
        """Return the mean of the micro-batches' gradients, ``[P]`` in fp32.

        Every worker adds its own micro-batches in fp32, one after the other, divides by W as DDP
        does, and rounds to the buffer's type. The buffers are then added in that type. A scale of
        the loss is a power of two: it is applied to the gradient here, with the same bits.

        Returns:
            None when the scaled sum is not finite; the scale is then halved for the next step.
        """
        arithmetic = self.arithmetic
        local_WP = _local_means(micro_gradients_MP, arithmetic.num_workers) * self._scale
        buffers_WP = local_WP.to(arithmetic.dtype) / arithmetic.num_workers
        total = torch.empty_like(buffers_WP[0])
        for bucket in self._buckets(total.numel()):
            order = self._order()
            total[bucket] = _sum_in_order(buffers_WP[:, bucket], order)
        mean = total.float() / self._scale
        if arithmetic.loss_scale and not bool(mean.isfinite().all()):
            self._scale /= 2
            self.num_skipped += 1
            return None
        return mean

    def _buckets(self, num_elements: int) -> Iterator[slice]:
        for start in range(0, num_elements, self._bucket_elements):
            yield slice(start, start + self._bucket_elements)

    def _order(self) -> list[int]:
        if not self.arithmetic.arrival:
            return list(range(self.arithmetic.num_workers))
        order: list[int] = torch.randperm(
            self.arithmetic.num_workers, generator=self._generator
        ).tolist()
        return order


def _local_means(micro_gradients_MP: Tensor, num_workers: int) -> Tensor:
    """Return each worker's gradient ``[W, P]``, the mean over its own micro-batches."""
    num_micro, num_elements = micro_gradients_MP.shape
    parts_WAP = micro_gradients_MP.view(num_workers, num_micro // num_workers, num_elements)
    accumulation = parts_WAP.shape[1]
    local_WP: Tensor = parts_WAP[:, 0] / accumulation
    for micro in range(1, accumulation):
        local_WP = local_WP + parts_WAP[:, micro] / accumulation
    return local_WP


def _sum_in_order(buffers_WP: Tensor, order: list[int]) -> Tensor:
    total = buffers_WP[order[0]].clone()
    for worker in order[1:]:
        total += buffers_WP[worker]
    return total
