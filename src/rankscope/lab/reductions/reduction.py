"""Sums over workers with the same bits in every run: in a fixed order, or of integers.

:class:`OrderedMean`: an all-reduce is a reduce-scatter and an all-gather. Here an all-to-all of the
same size takes the place of the first. After it each worker holds one W-th of *every* worker's
values, and adds them up itself: in rank order, in fp32 (float64 for float64 values), divided by W,
rounded once to the buffer's dtype. The price: nothing is summed on the way, so that between nodes
of several accelerators more bytes travel than in a hierarchical all-reduce.

Legend of shapes: W workers, n elements of a buffer, N = n // W elements of a piece.

The n mod W elements at the end of a buffer are no piece of anyone: every worker gets all of them
in a second, tiny all-gather.

:class:`DigitSums` adds accumulators instead. On CPUs an all-to-all gives each worker one W-th of
every worker's digits, which it adds up itself; elsewhere a reduce-scatter adds them on the way.
Each worker then rounds its W-th, and an all-gather sends it to all. Three numbers for each of the P
parameters of a bucket travel beside the digits: how many summands there are, and their range.
Pieces then have N = ceil(n / W) elements, the last one fewer.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from rankscope.lab.reductions.accumulator import Accumulator, add_bounds, convert, verdicts

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MIN_BLOCK_COLUMNS = 8192


@torch.no_grad()
def add_up(values_WN: Tensor, into: Tensor, divisor: float) -> None:
    """Add up all workers' values in rank order, divide once, and round once.

    Sum and quotient are in fp32, for float64 values in float64.

    Args:
        values_WN: All workers' values of some elements.
        into: ``[N]``: gets the result, in its own dtype; no memory in common with the values.
        divisor: What the sum is divided by.
    """
    num_workers, num_columns = values_WN.shape
    dtype = torch.promote_types(values_WN.dtype, torch.float32)
    elements = 1 << (17 if into.device.type == "cpu" else 22)  # on a CPU what its cache holds
    width = max(elements // num_workers, _MIN_BLOCK_COLUMNS)
    for first in range(0, num_columns, width):
        block = values_WN[:, first : first + width]
        place = into[first : first + width]
        total = place if into.dtype == dtype else block.new_empty(place.shape, dtype=dtype)
        total.copy_(block[0])
        for row in block[1:]:
            total += row
        if divisor != 1:
            total.div_(divisor)
        if total is not place:
            place.copy_(total)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A ``buffer`` ``[n]`` under way by its ``works``; in the end, ``result`` completes with it."""

    buffer: Tensor
    works: list[dist.Work]
    result: Future[Tensor]

    def abandon(self) -> None:
        """Wait until no communication touches the memory of an exchange that is not finished."""
        for work in self.works:
            with contextlib.suppress(RuntimeError):
                work.wait()

    def complete(self, gathered: Future[Any]) -> None:
        """Hand the buffer over, now that all workers' pieces of the result have arrived."""
        try:
            arrived = gathered.value()
            for each in arrived if isinstance(arrived, list) else ():
                if hasattr(each, "value"):  # a future, of collect_all
                    each.value()
        except Exception as error:
            self.result.set_exception(error)  # type: ignore[arg-type]
        else:
            self.result.set_result(self.buffer)


class Reduction:
    """Reduces buffers over a process group, one after the other, in memory that is used again.

    Every worker starts and finishes exchanges in the same order with equal sizes, and finishes (or
    abandons) one before it starts the next. The memory that is kept is that of the largest buffer
    since :meth:`trim`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._num_workers = group.size()
        self._rank = group.rank()
        self._on_cpu = device.type == "cpu"
        self._stream = None if self._on_cpu else torch.Stream(device)
        self._largest = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def trim(self) -> None:
        """Free memory that nothing needed since the last call; between exchanges only."""
        if self._memory.numel() > self._largest:
            self._memory = self._memory.new_empty(0)
        self._largest = 0

    def _borrow(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for so many numbers, until the exchange is finished."""
        num_bytes = count * dtype.itemsize
        self._largest = max(self._largest, num_bytes)
        if self._memory.numel() < num_bytes:
            self._memory = self._memory.new_empty(num_bytes)
            if self._stream is not None:
                self._memory.record_stream(self._stream)
        # No exchange may still use this memory, and none does: this worker's own communication
        # keeps its order, so that the next begins when the sums of the last are on their way.
        return self._memory[:num_bytes].view(dtype)

    def _broadcast(self, pieces: Iterable[Tensor]) -> Future[Any]:
        """Send each worker's piece to all others, in place: gloo's all-gather copies the whole."""
        works = [
            dist.broadcast(piece, group=self._group, group_src=worker, async_op=True)
            for worker, piece in enumerate(pieces)
            if piece.numel()
        ]
        return collect_all([work.get_future() for work in works])

    def _new_future(self, device: torch.device) -> Future[Tensor]:
        return Future() if self._stream is None else Future(devices=[device])

    def _launch(self, collective: Callable[..., Any], output: Tensor, values: Tensor) -> dist.Work:
        work: dist.Work = collective(output, values, group=self._group, async_op=True)
        return work


@dataclass(frozen=True, slots=True)
class OrderedExchange(Exchange):
    """A buffer whose values of all workers are being collected; in the end, their mean."""

    pieces_WN: Tensor
    ends_WE: Tensor


class OrderedMean(Reduction):
    """Averages buffers over a process group, in place, one after the other."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.divisor = float(self._num_workers)  # of the sums

    def start(self, buffer: Tensor) -> OrderedExchange:
        """Begin to average a contiguous buffer of floating-point numbers; returns at once.

        It must not be touched before ``result`` of the returned exchange completes.
        """
        whole, end = self._split(buffer)
        length = whole.numel() // self._num_workers
        pieces_WN = self._borrow(whole.numel(), buffer.dtype).view(self._num_workers, length)
        ends_WE = buffer.new_empty(self._num_workers, end.numel())
        if self._stream is not None:
            ends_WE.record_stream(self._stream)
        works = []
        if whole.numel():
            works.append(self._launch(dist.all_to_all_single, pieces_WN.view(-1), whole))
        if end.numel():
            works.append(self._launch(_all_gather_single, ends_WE.view(-1), end))
        future = self._new_future(buffer.device)
        return OrderedExchange(buffer, works, future, pieces_WN, ends_WE)

    @torch.no_grad()
    def finish(self, exchange: OrderedExchange) -> None:
        """Add up the collected values, and begin to send the mean to all workers.

        On a CPU this waits for the communication that :meth:`start` began; elsewhere only a
        stream of its own waits.
        """
        whole, end = self._split(exchange.buffer)
        with self._stream or contextlib.nullcontext():
            for work in exchange.works:
                work.wait()
            add_up(exchange.ends_WE, end, self.divisor)
            if not whole.numel():
                exchange.result.set_result(exchange.buffer)
                return
            own = whole.view(self._num_workers, -1)[self._rank]
            add_up(exchange.pieces_WN, own, self.divisor)
            self._gather(whole).then(exchange.complete)

    def _split(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part that falls into W equal pieces, and the rest."""
        border = buffer.numel() // self._num_workers * self._num_workers
        return buffer[:border], buffer[border:]

    def _gather(self, whole: Tensor) -> Future[Any]:
        """Send each worker's piece of a buffer to all others, in place."""
        pieces_WN = whole.view(self._num_workers, -1)
        if self._on_cpu:
            return self._broadcast(pieces_WN)
        return self._launch(_all_gather_single, whole, pieces_WN[self._rank]).get_future()


class Arena:
    """The digits of a bucket's parameters, one after the other; they are moved here for good."""

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

    ``digits`` are those of this worker's piece ``[W or 1, N, 2]``, ``bounds`` all workers' ``[W, P,
    3]``.
    """

    arena: Arena
    divisor: int
    digits: Tensor
    bounds: Tensor


class DigitSums(Reduction):
    """Adds accumulators over a process group, one bucket after the other."""

    def start(self, buffer: Tensor, arena: Arena, divisor: int) -> DigitExchange:
        """Begin to reduce a bucket; returns at once. The arena's sums are new ones afterwards.

        No deposits, and nothing that touches the buffer, before ``result`` completes.
        """
        assert buffer.numel() == arena.num_elements
        bounds_P3 = arena.take_bounds(self._num_workers)
        bounds = bounds_P3.new_empty(self._num_workers, *bounds_P3.shape)
        parts = self._num_workers if self._on_cpu else 1
        length = len(arena.digits) // self._num_workers
        digits = self._borrow(parts * length * 2, torch.int64).view(parts, length, 2)
        collective = dist.all_to_all_single if self._on_cpu else _reduce_scatter_single
        works = [
            self._launch(_all_gather_single, bounds.view(-1), bounds_P3.view(-1)),
            self._launch(collective, digits.view(-1), arena.digits.view(-1)),
        ]
        if self._stream is not None:  # which reads them after this worker has let go of them
            bounds.record_stream(self._stream)
            bounds_P3.record_stream(self._stream)
        future = self._new_future(buffer.device)
        return DigitExchange(buffer, works, future, arena, divisor, digits, bounds)

    @torch.no_grad()
    def finish(self, exchange: DigitExchange) -> None:
        """Round this worker's piece of the sum, send it; waits as :meth:`OrderedMean.finish`."""
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
            self._launch(_all_gather_single, whole, own).wait()
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
