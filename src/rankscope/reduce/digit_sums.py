"""The sum of all workers' accumulators, bucket by bucket: of digits, which have no order.

On CPUs an all-to-all gives each worker one W-th of every worker's digits, which it adds up itself;
elsewhere a reduce-scatter adds them on the way, as it likes: integers have the same sum in any
order. Each worker then rounds its W-th, and an all-gather sends it to all. Three numbers per
parameter travel beside the digits: how many summands there are, and their range.

Legend of shapes: W workers, P parameters of a bucket, n elements of it, N = ceil(n / W).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from rankscope.reduce.accumulator import Accumulator, add_bounds, convert, verdicts

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
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
class Exchange:
    """A bucket under way.

    Attributes:
        buffer: ``[n]``: where the reduced gradient will be.
        arena: The digits that travel.
        divisor: What the sum is divided by.
        digits: ``[W or 1, N, 2]``: digits of this worker's piece.
        bounds: ``[W, P, 3]``: all workers' bounds.
        works: The communication that fills these.
        result: Completes with the buffer, once it holds the reduced gradient.
    """

    buffer: Tensor
    arena: Arena
    divisor: int
    digits: Tensor
    bounds: Tensor
    works: list[dist.Work]
    result: Future[Tensor]

    def abandon(self) -> None:
        """Wait until no communication touches the memory of an exchange that is not finished."""
        for work in self.works:
            with contextlib.suppress(RuntimeError):
                work.wait()


class DigitSums:
    """Adds accumulators over a process group, one bucket after the other.

    Every worker calls :meth:`start` and :meth:`finish` in the same order with equal sizes, and
    finishes (or abandons) an exchange before it starts the next. The memory that is kept is that
    of the largest bucket since :meth:`trim`.

    Args:
        group: The workers.
        device: Where the gradients are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._num_workers = group.size()
        self._rank = group.rank()
        self._on_cpu = device.type == "cpu"
        self._stream = None if self._on_cpu else torch.Stream(device)
        self._largest = 0
        self._memory = torch.empty(0, dtype=torch.int64, device=device)

    def start(self, buffer: Tensor, arena: Arena, divisor: int) -> Exchange:
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
        digits = self._borrow(parts, len(arena.digits) // self._num_workers)
        collective = dist.all_to_all_single if self._on_cpu else _reduce_scatter_single
        works = [
            self._launch(_all_gather_single, bounds.view(-1), bounds_P3.view(-1)),
            self._launch(collective, digits.view(-1), arena.digits.view(-1)),
        ]
        if self._stream is not None:  # which reads them after this worker has let go of them
            bounds.record_stream(self._stream)
            bounds_P3.record_stream(self._stream)
        future: Future[Tensor] = Future(devices=None if self._stream is None else [buffer.device])
        return Exchange(buffer, arena, divisor, digits, bounds, works, future)

    @torch.no_grad()
    def finish(self, exchange: Exchange) -> None:
        """Round this worker's piece of the sum, and begin to send it to all workers.

        On a CPU this waits for the communication that :meth:`start` began; elsewhere only a
        stream of its own waits.
        """
        with self._stream or contextlib.nullcontext():
            for work in exchange.works:
                work.wait()
            if self._on_cpu:
                self._round(exchange, self._pieces(exchange.buffer)[self._rank])
                works = self._broadcast(exchange.buffer)
                futures = [work.get_future() for work in works]
                collect_all(futures).then(partial(_complete, exchange))
                return
            length = exchange.digits.shape[1]
            whole = exchange.buffer
            if len(whole) != length * self._num_workers:
                whole = whole.new_zeros(length * self._num_workers)
            own = whole.view(self._num_workers, -1)[self._rank]
            self._round(exchange, own[: max(0, self._end(exchange) - self._rank * length)])
            self._launch(_all_gather_single, whole, own).wait()
            if whole is not exchange.buffer:
                exchange.buffer.copy_(whole[: len(exchange.buffer)])
            exchange.result.set_result(exchange.buffer)

    def trim(self) -> None:
        """Free memory that nothing needed since the last call; between exchanges only."""
        if self._memory.numel() > self._largest:
            self._memory = self._memory.new_empty(0)
        self._largest = 0

    def _end(self, exchange: Exchange) -> int:
        """Return where this worker's piece ends in the bucket."""
        length = exchange.digits.shape[1]
        return min((self._rank + 1) * length, exchange.buffer.numel())

    def _round(self, exchange: Exchange, into: Tensor) -> None:
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

    def _broadcast(self, buffer: Tensor) -> list[dist.Work]:
        """Send each worker's piece to all others, in place: gloo's all-gather copies the whole."""
        return [
            dist.broadcast(piece, group=self._group, group_src=worker, async_op=True)
            for worker, piece in enumerate(self._pieces(buffer))
            if piece.numel()
        ]

    def _borrow(self, parts: int, length: int) -> Tensor:
        count = parts * length * 2
        self._largest = max(self._largest, count)
        if self._memory.numel() < count:
            self._memory = self._memory.new_empty(count)
            if self._stream is not None:
                self._memory.record_stream(self._stream)
        return self._memory[:count].view(parts, length, 2)

    def _launch(self, collective: Callable[..., Any], output: Tensor, values: Tensor) -> dist.Work:
        work: dist.Work = collective(output, values, group=self._group, async_op=True)
        return work


def _complete(exchange: Exchange, gathered: Future[Any]) -> None:
    try:
        for future in gathered.value():
            future.value()
    except Exception as error:
        exchange.result.set_exception(error)  # type: ignore[arg-type]
    else:
        exchange.result.set_result(exchange.buffer)
