"""The gradients after a backward pass under FSDP2, and whether the next one finds them unchanged.

Gradients wait for more in one of two places: whole, where the pass does not reduce them
(``set_requires_gradient_sync(False)``); or reduced, in ``.grad``, as this rank's shards. Each rank
compares its own shards with themselves.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.accumulator import AccumulatorAudit
from rankscope.wrappers.fsdp2_model import ManagedParameter
from rankscope.wrappers.fsdp2_shard import measure_shards
from rankscope.wrappers.tap import ReadReduced

State = tuple[int, int]
"""Address and version of a gradient: they change when something is accumulated into it."""


class AccumulatedGradients:
    """Measures gradients after backward passes, and compares them with those before the next ones.

    A pass that has reached a parameter before the model's output (a loss that uses a weight again)
    is not compared. One that has reduced some by then is known at once. Otherwise, since autograd
    adds to a gradient once in a pass: a gradient that has changed by then, and does not change
    afterwards, was reached before.

    Attributes:
        reduced: Totals of this rank's shards; None where they are not to be read.
    """

    def __init__(
        self, parameters: Collection[ManagedParameter], sketcher: Sketcher, read: ReadReduced
    ) -> None:
        self._parameters = parameters
        self._sketcher = sketcher
        self._read = read
        self.reduced = None if read is ReadReduced.OFF else sketcher.new_totals()
        self._audit = AccumulatorAudit({p.name: p.tensor for p in parameters}, sketcher)
        self._scratch: GradientTotals | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._audit.reset()
        self._left: GradientTotals | None = None  # after the last pass, if the next is compared
        self._unreduced: Mapping[ManagedParameter, State] = {}
        self._changed: dict[ManagedParameter, State] = {}  # before the pass that runs
        self._noticed = self._late = False

    def measure_unreduced(self) -> GradientTotals:
        """Measure the gradients that wait for their reduction."""
        totals = self._empty_scratch()
        found = [(p.name, p.unreduced, 0) for p in self._parameters]
        self._sketcher.measure_many([(n, g, at) for n, g, at in found if g is not None], totals)
        return totals

    def measure_reduced(self, parameters: Collection[ManagedParameter]) -> bool:
        """Measure this rank's shards, for which the current stream has been made to wait.

        Returns:
            Whether all of them are there.
        """
        readable = all(map(self._is_readable, parameters))
        if readable and self.reduced is not None:
            self.reduced.reset()
            self._measure_shards(parameters, self._read, self.reduced)
        return readable

    def begin_pass(self, *, measure: bool, begun: bool) -> None:
        """Measure the gradients, as soon as a backward pass has reached the model's output.

        Args:
            measure: Whether to do so.
            begun: Whether it has reduced some already.
        """
        if self._noticed or not measure or self._left is None:
            return
        self._noticed = True
        self._late = begun
        if not begun:
            waiting = self._parameters if self._unreduced else ()
            now = {p: state_of(g) for p in waiting if (g := p.unreduced) is not None}
            self._changed = {p: s for p, s in now.items() if s != self._unreduced.get(p)}
            self._audit.begin_pass(self._left, measure=True, begun=False)

    def see_summed(self, gradients: Iterable[tuple[ManagedParameter, Tensor]]) -> None:
        """Note whole gradients to which the pass adds no more."""
        if self._changed:
            self._late |= any(self._changed.get(p) == state_of(g) for p, g in gradients)

    def drop_pass(self, *, reduced: bool) -> None:
        """Note that the pass has accumulated nothing: the training wanted other gradients.

        Args:
            reduced: Whether it has reduced the sum of earlier ones.
        """
        self._audit.drop_pass()
        self._changed = {}
        self._noticed = False
        self._late = False
        if reduced:
            self._left = None

    def end_unreduced(
        self, totals: GradientTotals | None, states: Mapping[ManagedParameter, State]
    ) -> None:
        """End a pass that has left gradients to be reduced later.

        Args:
            totals: Of :meth:`measure_unreduced`; None if nothing was measured.
            states: The gradients'.
        """
        self._close()
        self._left = totals
        self._unreduced = states
        self._audit.end_pass(None if totals is None else self._read_unreduced)

    def end_reduced(
        self, parameters: Collection[ManagedParameter] = (), *, again: bool = False
    ) -> None:
        """End a pass that has reduced gradients.

        Args:
            parameters: Whose shards :meth:`measure_reduced` has just measured.
            again: Whether it has ended before the reduction.
        """
        self._close()
        self._left = self.reduced if parameters else None
        read = partial(self._measure_shards, parameters, ReadReduced.NORM)
        self._audit.end_pass(None if self._left is None else read, again=again)

    def collect(self) -> Tensor | None:
        """Return the step's changes: see :meth:`AccumulatorAudit.collect`."""
        return self._audit.collect()

    def _close(self) -> None:
        waiting = ((p, p.unreduced) for p in self._changed)
        self.see_summed([(p, g) for p, g in waiting if g is not None])
        if self._late:
            self._audit.drop_pass()
        self._changed = {}
        self._unreduced = {}
        self._noticed = False
        self._late = False

    def _read_unreduced(self, into: GradientTotals) -> None:
        there = [(p.name, p.unreduced) for p in self._parameters]
        self._sketcher.measure_norms([(n, g) for n, g in there if g is not None], into)

    def _is_readable(self, parameter: ManagedParameter) -> bool:
        shard = parameter.reduced
        here = shard is not None and shard.device == self._sketcher.device
        return here and parameter.group.reduced_is_readable

    def _measure_shards(
        self, parameters: Collection[ManagedParameter], read: ReadReduced, into: GradientTotals
    ) -> None:
        """Add the totals of shards, as those of the mean over the workers."""
        for scale in {p.group.reduced_scale for p in parameters}:
            totals = into if scale == 1 else self._empty_scratch()
            self._add_shards(
                [p for p in parameters if p.group.reduced_scale == scale], read, totals
            )
            if scale != 1:
                totals.scale(scale)
                into.add(totals)

    def _add_shards(
        self, parameters: Collection[ManagedParameter], read: ReadReduced, into: GradientTotals
    ) -> None:
        shards = [(p, shard) for p in parameters if (shard := p.reduced) is not None]
        if read is ReadReduced.NORM:
            self._sketcher.measure_norms([(p.name, shard) for p, shard in shards], into)
        else:
            measure_shards(self._sketcher, [(p.name, s, p.place) for p, s in shards], into)

    def _empty_scratch(self) -> GradientTotals:
        if self._scratch is None:
            self._scratch = self._sketcher.new_totals()
        self._scratch.reset()
        return self._scratch


def state_of(gradient: Tensor) -> State:
    """Return the address and version of a gradient, which change when something is added to it.

    Of a DTensor its own version counts: autograd leaves that of its local part alone.
    """
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.data_ptr(), gradient._version
