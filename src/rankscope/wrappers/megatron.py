"""The local gradient under Megatron-core's ``DistributedDataParallel``.

Its hooks add each micro-batch's gradient to ``main_grad``, a view of a buffer, and drop ``.grad``.
Buffers are cut into buckets. A group of buckets begins its reduction with ``start_grad_sync``: in
the last micro-batch's backward pass (``overlap_grad_reduce``), or after it. That scales the buffer
first. So the local gradient is read before that call, group by group, and the reduced one as soon
as the wrapper's ``finish_grad_sync`` has returned.

With the distributed optimizer the reduction is a reduce-scatter. Of each bucket, a worker then
holds one shard of the reduced gradient; nobody uses the rest of the bucket.

The gradient is that of the tensor on which ``backward`` is called: with Megatron's schedules, the
loss divided by the number of micro-batches, or a sum over tokens (``calculate_per_token_loss``),
times the loss scale.

Legend of shapes: W workers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.megatron_model import (
    factor_of_mean,
    is_sharded,
    megatron_process_group,
    own_shards,
    whole_gradients,
)
from rankscope.wrappers.parts import MicroBatches
from rankscope.wrappers.passes import BackwardEnd
from rankscope.wrappers.tap import GradientTap, Guarded, LocalGradient, ReadReduced, guarded


class MegatronTap(GradientTap):
    """Reads gradients of Megatron-core's ``DistributedDataParallel``.

    Its arguments are those of :class:`~rankscope.wrappers.hooked.HookedTap`, after the wrapper.

    Raises:
        UnsupportedError: The wrapper works in a way that cannot be watched.
    """

    def __init__(
        self,
        ddp: Any,
        parameters: Mapping[str, Tensor],
        sketcher: Sketcher,
        guarded: Guarded,
        *,
        reduced: ReadReduced,
    ) -> None:
        self._num_workers = megatron_process_group(ddp).size()
        self._factor = factor_of_mean(ddp)
        self._sharded = is_sharded(ddp)
        self._sketcher = sketcher
        self._guarded = guarded
        self._read_reduced = reduced
        self._totals = sketcher.new_totals()
        self._reduced = sketcher.new_totals()
        self._grown = sketcher.new_totals()
        self._micro = MicroBatches()
        self._backward = BackwardEnd(self._begin_backward, self._end_backward, guarded)
        self._reached: list[Callable[[], None]] = []  # called if the pass that runs trains
        self._buffers = [buffer.grad_data for buffer in ddp.buffers]
        self._versions: list[int] = []  # of the buffers, when the pass began
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._groups = [_Group(group, names, self._read_group) for group in ddp.bucket_groups]
        self._all = [part for group in self._groups for part in group.gradients]
        self._held = self._all
        if self._sharded:
            self._held = [p for group in ddp.bucket_groups for p in own_shards(group, names)]
        self._stop = Relay(ddp, "finish_grad_sync").subscribe(after=self._finish)
        self._measure = self._unreduced = self._complete = self._begun = False
        self._carried_over: Tensor | None = None
        self._start_again()

    @property
    def reduced_copies(self) -> int:
        """How many workers hold each element of the reduced gradient: W or, of a shard, 1."""
        return 1 if self._sharded else self._num_workers

    @property
    def summed_workers(self) -> float:
        """1 for a mean, W under ``calculate_per_token_loss``."""
        return self._factor

    @property
    def unreduced(self) -> bool:
        """Whether a backward pass has ended since the last reduction."""
        return self._unreduced

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training; one past the wrapper is seen by its hooks as well.

        The sum of earlier passes is read here: only now it is known that they were not the step's
        last.
        """
        if self._measure and measure and self._num_new and self._sketcher.sketches:
            self._grown.reset()
            self._sketcher.measure_many(self._all, self._grown)
            self._add_micro_batch(self._grown, last=False)
        self._backward.begin()
        self._measure = measure

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output."""
        if self._measure and not self._begun:
            self._carried_over = self._sketcher.holds_any([g for _, g, _ in self._all])
        self._begun = True
        self._backward.notice()
        self._reached.append(trained)

    @property
    def complete(self) -> bool:
        """Whether a reduction has ended since the last :meth:`collect`."""
        return self._complete

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._backward.running

    def collect(self) -> LocalGradient | None:
        """Return the step's measurements and start again; None without valid ones."""
        gradient = None
        if self._measure and self._complete and all(group.reads == 1 for group in self._groups):
            reduced = None if self._read_reduced is ReadReduced.OFF else self._reduced
            micro = self._micro.squared_norms() if self._one_each else None
            gradient = LocalGradient(self._totals, reduced, micro, self._carried_over)
        self._start_again()
        return gradient

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._stop()
        for group in self._groups:
            group.stop()

    def _start_again(self) -> None:
        self._backward.begin()
        self._complete = self._begun = False
        self._carried_over = None
        self._one_each = True  # each reading holds one micro-batch more than the last one
        self._num_new = 0  # backward passes since the last reading
        self._micro.reset()
        for group in self._groups:
            group.reads = 0

    def _begin_backward(self) -> None:
        self._reached.clear()
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [buffer._version for buffer in self._buffers]

    def _end_backward(self) -> None:
        if self._versions == self._now():
            return  # the training wanted gradients, and accumulated none
        for trained in self._reached:
            trained()
        self._num_new += 1
        self._unreduced = True

    def _add_micro_batch(self, totals: GradientTotals, *, last: bool) -> None:
        self._one_each &= self._num_new == 1
        self._num_new = 0
        self._micro.add(totals, last=last)

    @guarded
    def _read_group(self, group: "_Group") -> None:
        """Read the local gradient of buckets whose reduction is about to begin."""
        if not self._measure or group.begun:  # then the call does nothing
            return
        if not any(each.reads for each in self._groups):
            self._totals.reset()
        group.reads += 1
        self._sketcher.measure_many(group.gradients, self._totals)

    @guarded
    def _finish(self, *args: Any, **kwargs: Any) -> None:
        """Close a step: all reductions are over, and nothing has touched the gradients since."""
        self._complete = True
        self._unreduced = False
        if not self._measure:
            return
        if self._sketcher.sketches:
            self._add_micro_batch(self._totals, last=True)
        if self._read_reduced is ReadReduced.OFF:
            return
        self._reduced.reset()
        if self._read_reduced is ReadReduced.NORM:
            norms = [(name, part) for name, part, _ in self._held]
            self._sketcher.measure_norms(norms, self._reduced)
        else:
            self._sketcher.measure_many(self._held, self._reduced)
        self._reduced.scale(1 / self._factor)


class _Group:
    """A group of buckets, which are reduced together; ``starts`` is called before each reduction.

    Attributes:
        gradients: Those in it.
        reads: How often they were read in this step: more than once where they are reduced again,
            so that the later reading is not of a local gradient.
    """

    def __init__(
        self, group: Any, names: Mapping[int, str], starts: Callable[["_Group"], None]
    ) -> None:
        self.gradients = whole_gradients(group, names)
        self.reads = 0
        self._group = group
        self._starts = starts
        self.stop = Relay(group, "start_grad_sync").subscribe(before=self._see_start)

    @property
    def begun(self) -> bool:
        """Whether their reduction has begun and has not ended."""
        return self._group.grad_reduce_handle is not None

    def _see_start(self, *args: Any, **kwargs: Any) -> None:
        self._starts(self)
