"""How the local gradients of a backward pass under DDP are read: together, wherever that is safe.

Without bucket views, the local gradient stays in ``.grad`` until DDP finishes its reduction, in a
callback at the end of the backward pass. All are read there, just before, in one go: hooks have
only counted until then. What else may happen to a gradient before is learnt: in the first passes
each is read in its hook, and looked at again at the end. One that has been changed or taken away by
then (a sparse one, which DDP divides in place; by a hook or an optimizer of the training's) is read
in its hook from then on.

With bucket views, DDP moves each gradient into its bucket, and reduces it there, as soon as its
hooks are done. A gradient that was made in this step is a tensor of its own until then: the last
few are kept, up to some megabytes, and read together. One that lies in its bucket already, since
it was zeroed in place, is read in its hook.
"""

from collections.abc import Collection, Container, Mapping

from torch import Tensor

from rankscope.capture.sketch import Measured, Sketcher
from rankscope.capture.tap import ReadReduced
from rankscope.capture.totals import GradientTotals
from rankscope.capture.witness import GradientWitness

_LEARNT_IN = 2  # passes: DDP differs in its first one
_KEPT_BYTES = 32 << 20

_State = tuple[int, int]
"""Address and version of a tensor: both stay while nobody changes it."""

_UNKNOWN: _State = (-1, -1)


class LocalReading:
    """Reads the local gradients of backward passes.

    Args:
        parameters: The parameters, by name.
        sketcher: Measures.
        witness: Is shown those that it wants.
        in_buckets: Whether DDP moves gradients into its buckets.

    Attributes:
        totals: Of the last pass that was measured.
        late: The parameters whose hooks need only be counted now.
        read_late: Those of the last pass that were read together at its end.
        spoiled: Whether the pass was not read as it should be.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        sketcher: Sketcher,
        witness: GradientWitness,
        *,
        in_buckets: bool,
    ) -> None:
        self._parameters, self._sketcher, self._witness = parameters, sketcher, witness
        self._in_buckets = in_buckets
        self.totals = sketcher.new_totals()
        self.late: Collection[str] = ()
        self.read_late: Collection[str] = ()
        self.spoiled = False
        self._lasting = {True: _Lasting(), False: _Lasting()}  # with a reduction, and without
        if in_buckets:
            self._lasting[True].give_up()
        self._unkeepable: set[str] = set()
        self._made_here: Container[str] = ()  # in this step
        self._kept: list[tuple[Measured, int]] = []  # with versions
        self._kept_bytes = 0
        self._seen: dict[str, _State] = {}  # read in hooks, or guards
        self._measure = self._synchronises = False
        self._wanted: Collection[str] = ()

    def begin_step(self) -> None:
        """Begin a step, in its first pass: see which gradients are made in it."""
        if self._in_buckets:
            self._made_here = {n for n, p in self._parameters.items() if p.grad is None}

    def begin_pass(self, first: str, *, measure: bool, synchronises: bool) -> None:
        """Begin a backward pass, in the hook of its first gradient.

        Args:
            first: Whose gradient it is.
            measure: Whether to measure.
            synchronises: Whether DDP reduces in this pass.
        """
        self.forget()
        self._measure, self._synchronises = measure, synchronises
        wanted = self._witness.wanted_names
        self._wanted = [name for name in self._parameters if name in wanted]
        if measure:
            self.totals.reset()
        lasting = self._lasting[synchronises].names
        late = set(lasting) if measure else set(self._parameters)
        late.difference_update(name for name in self._wanted if name not in lasting)
        # One gradient goes through take(), which tells whether this pass is like others.
        late.discard(first if first in lasting or not lasting else min(lasting))
        self.late = late

    def forget(self) -> None:
        """Forget a pass that was never finished."""
        self.late = self.read_late = ()
        self.spoiled = False
        self._seen.clear()
        self._kept.clear()
        self._kept_bytes = 0

    def take(self, name: str, gradient: Tensor | None) -> None:
        """Take a whole local gradient, in its hook; None where the training has taken it away."""
        lasts = name in self._lasting[self._synchronises].names
        if not lasts and gradient is not None and name in self._wanted:
            self._witness.see_local(name, gradient)
        if not self._measure:
            return
        if gradient is None:
            self.spoiled = True
        elif lasts:
            self._seen[name] = _state_of(gradient)  # the first one: read at the end
        elif self._keeps(name, gradient):
            self._kept.append(((name, gradient, 0), gradient._version))
            self._kept_bytes += gradient.numel() * gradient.itemsize
            if self._kept_bytes >= _KEPT_BYTES:
                self._read_kept()
        else:
            self._sketcher.measure(name, gradient, self.totals)
            self._seen[name] = _state_of(gradient)

    def end_pass(self, called: Collection[str]) -> None:
        """Read all that was not read in hooks, before DDP finishes its reduction.

        Args:
            called: The parameters whose hooks were called.
        """
        late, self.late = self.late, ()
        self.read_late = late if self._measure else ()
        lasting = self._lasting[self._synchronises]
        wanted = [name for name in self._wanted if name in lasting.names and name in called]
        gradients = [(name, self._parameters[name].grad) for name in wanted]
        shown = [(name, gradient) for name, gradient in gradients if gradient is not None]
        if shown:
            self._witness.see_locals(shown)
        if not self._measure:
            return
        self._read_kept()
        now = {name: _state_of(self._parameters[name].grad) for name in self._seen}
        if lasting.names:
            # In the order in which reduced ones are read: what is prepared serves both.
            names = [n for n in self._parameters if n in lasting.names and n in called]
            self._read_late(names, lasting, now)
        else:
            same = {n for n, state in now.items() if state == self._seen[n] != _UNKNOWN}
            lasting.learn(same)

    def _read_late(
        self, names: Collection[str], lasting: "_Lasting", now: Mapping[str, _State]
    ) -> None:
        """Read gradients that should be as they were in their hooks."""
        gradients = [(name, self._parameters[name].grad, 0) for name in names]
        there: list[Measured] = [(n, g, 0) for n, g, _ in gradients if g is not None]
        guards = [name for name in self._seen if name in lasting.names]
        if len(there) < len(gradients) or any(now[n] != self._seen[n] for n in guards):
            self.spoiled = True
            lasting.give_up()
        else:
            self._sketcher.measure_many(there, self.totals)

    def _keeps(self, name: str, gradient: Tensor) -> bool:
        """Return whether a gradient outlives its hook as long as somebody holds it."""
        if not self._synchronises or name not in self._made_here or name in self._unkeepable:
            return False
        return type(gradient) is Tensor and not gradient.is_sparse

    def _read_kept(self) -> None:
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        self._kept_bytes = 0
        changed = {named[0] for named, version in kept if named[1]._version != version}
        if changed:
            self.spoiled = True
            self._unkeepable |= changed
        self._sketcher.measure_many([named for named, _ in kept], self.totals)


class _Lasting:
    """The parameters whose gradients are at the end of a pass what they were in their hooks."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._candidates: set[str] | None = None
        self._left = _LEARNT_IN

    def learn(self, unchanged: set[str]) -> None:
        """Take note of a pass."""
        if self._left <= 0:
            return
        known = unchanged if self._candidates is None else self._candidates & unchanged
        self._candidates = known
        self._left -= 1
        if not self._left:
            self.names = frozenset(known)

    def give_up(self) -> None:
        """Take no gradient for lasting any more."""
        self.names, self._left = frozenset(), 0


def _state_of(gradient: Tensor | None) -> _State:
    if gradient is None or gradient.is_sparse or type(gradient) is not Tensor:
        return _UNKNOWN
    return gradient.data_ptr(), gradient._version


def measure_reduced(
    parameters: Mapping[str, Tensor],
    sketcher: Sketcher,
    read: ReadReduced,
    used: Container[str],
    into: GradientTotals,
) -> bool:
    """Measure the reduced gradient; return whether all of it was there.

    Args:
        parameters: The parameters, by name.
        sketcher: Measures.
        read: What to read.
        used: The parameters that have a gradient of this step.
        into: The totals; what is in them is forgotten.
    """
    into.reset()
    gradients = [(name, parameter.grad) for name, parameter in parameters.items()]
    if any(gradient is None and name in used for name, gradient in gradients):
        return False  # an optimizer inside the backward pass has taken it already
    there = [(name, gradient, 0) for name, gradient in gradients if gradient is not None]
    if read is ReadReduced.NORM:
        sketcher.measure_norms([(name, gradient) for name, gradient, _ in there], into)
    else:
        sketcher.measure_many(there, into)
    return True
