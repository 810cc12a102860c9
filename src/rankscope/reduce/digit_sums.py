"""The sum of all workers' accumulators, bucket by bucket: of digits, which have no order.

On CPUs an all-to-all gives each worker one W-th of every worker's digits, which it adds up itself;
elsewhere a reduce-scatter adds them on the way, as it likes: integers have the same sum in any
order. Each worker then rounds its W-th, and an all-gather sends it to all. Three numbers per
parameter travel beside the digits: how many summands there are, and their range.

Legend of shapes: W workers, P parameters of a bucket, n elements of it, N = ceil(n / W).
"""

import contextlib
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.reduce.accumulator import Accumulator, add_bounds, convert, verdicts
from rankscope.reduce.reduction import Exchange, Reduction, all_gather_single

_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Arena:
    """The digits of a bucket's parameters, one after the other; they are moved here for good.

    Args:
        sums: The parameters' accumulators, in the bucket's order.
        num_workers: Into how many equal pieces the digits are cut; the last one is padded.
    """

    def __init__(self, sums: list[Accumulator], num_workers: int) -> None:
        self.sums = sums
        self.sizes = [len(each.digits) for each in sums]
        self.num_elements = sum(self.sizes)
        rows = -(-self.num_elements // num_workers) * num_workers
        self.digits = torch.zeros(rows, 2, dtype=torch.int64, device=sums[0].digits.device)
        parts = torch.split(self.digits[: self.num_elements], self.sizes)
        for each, part in zip(sums, parts, strict=True):
            part.copy_(each.digits)
            each.digits = part

    def take_bounds(self, num_workers: int) -> Tensor:
        """Make the digits ready to be sent, begin new sums, and return the bounds ``[P, 3]``."""
        bounds_P3 = torch.stack([each.bounds for each in self.sums])
        for each in self.sums:
            if each.empty:
                each.digits.zero_()
            each.make_room(num_workers)
            each.clear()
        return bounds_P3


@dataclass(frozen=True, slots=True)
class DigitExchange(Exchange):
    """A bucket whose digits of all workers are being collected; in the end, the reduced gradient.

    Attributes:
        arena: The digits that travel.
        divisor: What the sum is divided by.
        digits: ``[W or 1, N, 2]``: digits of this worker's piece.
        bounds: ``[W, P, 3]``: all workers' bounds.
    """

    arena: Arena
    divisor: int
    digits: Tensor
    bounds: Tensor


class DigitSums(Reduction):
    """Adds accumulators over a process group, one bucket after the other."""

    def start(self, buffer: Tensor, arena: Arena, divisor: int) -> DigitExchange:
        """Begin to reduce a bucket; returns at once. The arena's sums are new ones afterwards.

        Args:
            buffer: ``[n]``: the bucket; it must not be touched before ``result`` completes.
            arena: The accumulators of its parameters; no deposits before ``result`` completes.
            divisor: What the sum is divided by.
        """
        assert buffer.numel() == arena.num_elements
        bounds_P3 = arena.take_bounds(self._num_workers)
        bounds = bounds_P3.new_empty(self._num_workers, *bounds_P3.shape)
        parts = self._num_workers if self._on_cpu else 1
        length = len(arena.digits) // self._num_workers
        digits = self._borrow(parts * length * 2, torch.int64).view(parts, length, 2)
        collective = dist.all_to_all_single if self._on_cpu else _reduce_scatter_single
        works = [
            self._launch(all_gather_single, bounds.view(-1), bounds_P3.view(-1)),
            self._launch(collective, digits.view(-1), arena.digits.view(-1)),
        ]
        if self._stream is not None:  # which reads them after this worker has let go of them
            bounds.record_stream(self._stream)
            bounds_P3.record_stream(self._stream)
        future = self._new_future(buffer.device)
        return DigitExchange(buffer, works, future, arena, divisor, digits, bounds)

    @torch.no_grad()
    def finish(self, exchange: DigitExchange) -> None:
        """Round this worker's piece of the sum, and begin to send it to all workers.

        On a CPU this waits for the communication that :meth:`start` began; elsewhere only a
        stream of its own waits.
        """
        with self._stream or contextlib.nullcontext():
            for work in exchange.works:
                work.wait()
            if self._on_cpu:
                self._round(exchange, self._pieces(exchange.buffer)[self._rank])
                self._broadcast(self._pieces(exchange.buffer)).then(exchange.complete)
                return
            length = exchange.digits.shape[1]
            whole = exchange.buffer
            if len(whole) != length * self._num_workers:
                whole = whole.new_zeros(length * self._num_workers)
            own = whole.view(self._num_workers, -1)[self._rank]
            self._round(exchange, own[: max(0, self._end(exchange) - self._rank * length)])
            self._launch(all_gather_single, whole, own).wait()
            if whole is not exchange.buffer:
                exchange.buffer.copy_(whole[: len(exchange.buffer)])
            exchange.result.set_result(exchange.buffer)

    def _end(self, exchange: DigitExchange) -> int:
        """Return where this worker's piece ends in the bucket."""
        length = exchange.digits.shape[1]
        return min((self._rank + 1) * length, exchange.buffer.numel())

    def _round(self, exchange: DigitExchange, into: Tensor) -> None:
        if not into.numel():
            return
        convert(exchange.digits[:, : into.numel()], into, exchange.divisor)
        verdicts_P = verdicts(add_bounds(exchange.bounds))
        if self._on_cpu and not verdicts_P.any():
            return
        sizes = torch.tensor(exchange.arena.sizes, device=verdicts_P.device)
        end = self._end(exchange)
        spread = verdicts_P.repeat_interleave(sizes, output_size=exchange.buffer.numel())
        into += spread[end - into.numel() : end].to(into.dtype)

    def _pieces(self, buffer: Tensor) -> list[Tensor]:
        length = -(-buffer.numel() // self._num_workers)
        borders = [min(w * length, buffer.numel()) for w in range(self._num_workers + 1)]
        return [buffer[a:b] for a, b in pairwise(borders)]
