"""Reads the local gradients of a backward pass under DDP: together, wherever that is safe.

Without bucket views, the local gradient stays in ``.grad`` until DDP finishes its reduction, in a
callback at the end of the backward pass. All are read there, just before, in one go: hooks have
only counted until then. The first passes show which gradients that is safe for: each is read in its
hook, and compared at the end. One that has been changed or taken away by then (a sparse one, which
DDP divides in place; by a hook or an optimizer of the training's) is read in its hook from then on.

With bucket views, DDP moves each gradient into its bucket, and reduces it there, as soon as its
hooks are done. A gradient that was made in this step is a tensor of its own until then: the last
few are collected, up to some megabytes, and read together. One that lies in its bucket already,
since it was zeroed in place, is read in its hook.

A small gradient that must be read in its hook is copied there, and read together with others: one
call for each would take longer than the copy.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from operator import attrgetter, call, is_
from weakref import ref

from torch import Tensor

from rankscope.bus.probe import Probe
from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.tap import ReadReduced

_LEARNT_IN = 2  # passes: DDP differs in its first one
_TRUSTED_AFTER = 4  # steps that were alike
_TRUSTED_AFTER_MOST = 1024  # such steps, after steps that were not
_KEPT_BYTES = 32 << 20
_COPIED_BYTES = 1 << 14  # of a gradient, at most: a longer one is read faster than copied
_FEW = 8  # parameters: hooks cost nothing

_State = tuple[int, int]
"""Address and version of a tensor: both stay while nobody changes it."""

_UNKNOWN: _State = (-1, -1)

GradientRefs = tuple[tuple[str, ...], list["ref[Tensor]"]]
"""Names of parameters, and weak references to their gradients: the training may free them."""

NO_REFS: GradientRefs = ((), [])

_gradient_of = attrgetter("grad")
_version_of = attrgetter("_version")
_is_none = partial(is_, None)


class LocalReading:
    """Reads the local gradients of backward passes."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        sketcher: Sketcher,
        observer: Probe,
        *,
        in_buckets: bool,
    ) -> None:
        self._parameters = parameters
        self._sketcher = sketcher
        self._observer = observer
        self._in_buckets = in_buckets
        self.totals = sketcher.new_totals()  # of the last pass that was measured
        self.late: Collection[str] = ()  # parameters whose hooks need only be counted now
        self.read_late: Collection[str] = ()  # those that were read at the end of the last pass
        self.never_late: Collection[str] = ()
        """Parameters that are always read in their hooks, since others may change their gradient
        later without a change of its version."""
        self.left_out: Collection[str] = ()  # of the step
        self._refs: GradientRefs = NO_REFS
        self.spoiled = False  # the pass was not read as it should be
        self._all = tuple(parameters)
        self._number_of = {name: number for number, name in enumerate(parameters)}
        self._every = list(parameters.values())
        self._found: list[Tensor] | None = None  # gradients of all, at the end of a pass
        self.held_at_ends = False
        """Whether the step's first pass has found gradients that it was expected to make: then only
        those of a few parameters are known to be older."""
        self._ends = self._all[:1] + self._all[-1:]
        self._stable = {
            True: _StableGradients(),
            False: _StableGradients(),
        }  # with a reduction, and without
        if in_buckets:
            self._stable[True].give_up()
        self._unkeepable: set[str] = set()
        self._made_here: Container[str] = ()  # in this step
        self._kept: list[tuple[Measured, int]] = []  # with versions; also copies
        self._kept_bytes = 0
        self._seen: dict[str, _State] = {}  # read in hooks, or guards
        self._measure = False  # this pass
        self._synchronises = False  # this pass
        self._wanted: Mapping[str, None] = {}  # in an order
        self._made = _MadeGradients(parameters)
        self._late: frozenset[str] = frozenset()
        self._chosen: tuple[object, ...] = ()  # the key of ``_late``

    def hooked(self, *, synchronises: bool) -> Collection[str]:
        """Return the parameters whose hooks a backward pass needs; the others are read without.

        Where the step's first pass makes all gradients, those that exist at its end show which
        parameters took part. Two parameters that every pass reaches show its beginning.
        """
        if not self._made.trusted or self._in_buckets or len(self._all) < _FEW:
            return self._all
        stable = self._stable[synchronises].names
        return self._ends if len(stable) == len(self._all) else self._all

    def take_refs(self) -> GradientRefs:
        """Return the gradients that were read together in the pass, and forget them."""
        refs, self._refs = self._refs, NO_REFS
        return refs

    def begin_pass(self, first: str, *, measure: bool, synchronises: bool) -> None:
        """Begin a backward pass, in the hook of its first gradient."""
        self.forget()
        self._measure = measure
        self._synchronises = synchronises
        wanted = self._observer.wanted_names
        self._wanted = dict.fromkeys(n for n in wanted if n in self._parameters)
        if measure:
            self.totals.reset()
        stable = self._stable[synchronises].names
        read_in_hooks = frozenset(self._wanted).difference(stable)
        # One gradient goes through take(), which shows whether this pass is like others.
        guard = first if first in stable or not stable else min(stable)
        chosen = stable if measure else None, read_in_hooks, guard
        if chosen != self._chosen:
            late = stable if measure else frozenset(self._parameters)
            self._chosen = chosen
            self._late = late - read_in_hooks - {guard}
        self.late = self._late

    def begin_step(self, first: str) -> list[Tensor]:
        """Begin a step, in its first pass; return the gradients that were there before it.

        Where the last few steps made all, their versions show at the end whether this one does, and
        only one that the pass has not reached is read here. That of ``first`` is there already.
        """
        self.held_at_ends = False
        if self._in_buckets:
            self._made_here = {n for n, p in self._parameters.items() if p.grad is None}
        reads_all = len(self._stable[self._synchronises].names) == len(self._all)
        if self._made.trusted and self._measure and reads_all:
            ends = [
                self._parameters[n].grad for n in self._ends if n not in (first, *self.left_out)
            ]
            left = [gradient for gradient in ends if gradient is not None]
            self.held_at_ends = bool(left)
            self._made.begin(_Versions.EXPECTED, held=bool(left))
            return left
        own = self._parameters[first].grad
        gradients = map(_gradient_of, _without(self._parameters, self.left_out).values())
        held = [g for g in gradients if g is not None and g is not own]
        self._made.begin(_Versions.LEARNT, held=bool(held))
        return held

    def forget(self) -> None:
        """Forget a pass that was never finished."""
        self.late = self.read_late = ()
        self._refs = NO_REFS
        self.spoiled = False
        self._made.forget_pass()
        self._seen.clear()
        self._found = None
        self._kept.clear()
        self._kept_bytes = 0

    def take(self, name: str, gradient: Tensor | None) -> None:
        """Read a whole local gradient, in its hook; None where the training has taken it away."""
        stable = name in self._stable[self._synchronises].names
        if not stable and gradient is not None and name in self._wanted:
            self._observer.see_local(name, gradient)
        if not self._measure:
            return
        if gradient is None:
            self.spoiled = True
        elif stable:
            self._seen[name] = _state_of(gradient)  # the first one: read at the end
        elif self._keeps(name, gradient):
            self._keep(name, gradient)
        else:
            self._seen[name] = _state_of(gradient)
            if _is_small(gradient):
                self._keep(name, gradient.detach().clone())
            else:
                self._sketcher.measure(name, gradient, self.totals)

    def with_gradient(self) -> Sequence[str]:
        """Return the names of the parameters that have a gradient, at the end of a pass."""
        gradients = list(map(_gradient_of, self._every))
        if not _lacks_any(gradients):
            self._found = gradients
            return self._all
        both = zip(self._all, gradients, strict=True)
        return [name for name, gradient in both if gradient is not None]

    def end_pass(self, called: Collection[str]) -> None:
        """Read all that was not read in the hooks ``called``, before DDP finishes its reduction."""
        found, self._found = self._found, None  # the training may free them
        late, self.late = self.late, ()
        self.read_late = late if self._measure else ()
        stable = self._stable[self._synchronises]
        wanted = [name for name in self._wanted if name in stable.names and name in called]
        gradients = [(name, self._parameters[name].grad) for name in wanted]
        shown = [(name, gradient) for name, gradient in gradients if gradient is not None]
        if shown:
            self._observer.see_locals(shown)
        if not self._measure:
            return
        self._read_kept()
        now = {name: _state_of(self._parameters[name].grad) for name in self._seen}
        if stable.names:
            self._read_late(called, stable, now, found)
        else:
            same = {n for n, state in now.items() if state == self._seen[n] != _UNKNOWN}
            stable.learn(same.difference(self.never_late))

    def _read_late(
        self,
        called: Collection[str],
        stable: "_StableGradients",
        now: Mapping[str, _State],
        found: list[Tensor] | None,
    ) -> None:
        """Read gradients that should be as they were in their hooks."""
        names = self._all
        gradients = found
        if len(called) < len(names) or len(stable.names) < len(names):
            names = tuple(name for name in names if name in called and name in stable.names)
            gradients = None
        if gradients is None:
            gradients = list(map(_gradient_of, map(self._parameters.__getitem__, names)))
        changed = any(now[n] != seen for n, seen in self._seen.items() if n in stable.names)
        if changed or _lacks_any(gradients):
            self.spoiled = True
            stable.give_up()
        elif not self._made.agree(names, gradients):
            self.spoiled = True
        else:
            self._sketcher.measure_tensors(names, gradients, self.totals)
            self._refs = names, list(map(ref, gradients))

    def _keeps(self, name: str, gradient: Tensor) -> bool:
        """Return whether a gradient stays as it is after its hook while we hold it."""
        if not self._synchronises or name not in self._made_here or name in self._unkeepable:
            return False
        return type(gradient) is Tensor and not gradient.is_sparse

    def _keep(self, name: str, gradient: Tensor) -> None:
        self._kept.append(((name, gradient, 0), gradient._version))
        self._kept_bytes += gradient.numel() * gradient.itemsize
        if self._kept_bytes >= _KEPT_BYTES:
            self._read_kept()

    def _read_kept(self) -> None:
        if not self._kept:
            return
        kept = sorted(self._kept, key=lambda each: self._number_of[each[0][0]])
        self._kept = []
        self._kept_bytes = 0
        changed = {named[0] for named, version in kept if named[1]._version != version}
        if changed:
            self.spoiled = True
            self._unkeepable |= changed
        self._sketcher.measure_many([named for named, _ in kept], self.totals)


class _Versions(Enum):
    """What becomes of the versions of gradients at the end of a pass."""

    IGNORED = auto()  # it has not begun a step, or adds to older gradients
    LEARNT = auto()
    EXPECTED = auto()  # to be those that were learnt


class _MadeGradients:
    """Whether the first pass of a step makes all gradients, or adds to older ones.

    A gradient that a pass makes has another version than one that it adds to. Once the versions
    were the same in a number of steps in a row, others show that a step is not like those.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._all = tuple(parameters)
        self._learnt: list[int] = []
        self._times = 0  # in a row
        self._trusted_after = _TRUSTED_AFTER  # doubled after each failure
        self._use = _Versions.IGNORED

    @property
    def trusted(self) -> bool:
        """Whether the last few steps made all gradients."""
        return self._times >= self._trusted_after

    def forget_pass(self) -> None:
        """Forget a pass that was never finished."""
        self._use = _Versions.IGNORED

    def begin(self, use: _Versions, *, held: bool) -> None:
        """Begin a step in its first pass; ``held``: there were gradients before."""
        if held:
            self._times = 0
        else:
            self._use = use

    def agree(self, names: tuple[str, ...], gradients: list[Tensor]) -> bool:
        """Return whether the pass has made its gradients, if it was expected to."""
        versions = list(map(_version_of, gradients))
        if self._use is _Versions.LEARNT and names == self._all:
            self._times = self._times + 1 if versions == self._learnt else 1
            self._learnt = versions
        if self._use is not _Versions.EXPECTED or versions == self._learnt:
            return True
        learnt = dict(zip(self._all, self._learnt, strict=True))
        unused = self._parameters.keys() - set(names)
        as_before = versions == [learnt[name] for name in names] and all(
            self._parameters[name].grad is None for name in unused
        )
        if not as_before:
            self._times = 0
            self._trusted_after = min(2 * self._trusted_after, _TRUSTED_AFTER_MOST)
        return as_before


class _StableGradients:
    """The parameters whose gradients stay unchanged from their hooks to the end of a pass."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._candidates: set[str] | None = None
        self._left = _LEARNT_IN

    def learn(self, unchanged: set[str]) -> None:
        """Learn from a pass."""
        if self._left <= 0:
            return
        if self._candidates is None:
            self._candidates = unchanged
        else:
            self._candidates = self._candidates & unchanged
        self._left -= 1
        if not self._left:
            self.names = frozenset(self._candidates)

    def give_up(self) -> None:
        """Take no gradient for stable any more."""
        self.names = frozenset()
        self._left = 0


def _state_of(gradient: Tensor | None) -> _State:
    if gradient is None or gradient.is_sparse or type(gradient) is not Tensor:
        return _UNKNOWN
    return gradient.data_ptr(), gradient._version


def _is_small(gradient: Tensor) -> bool:
    """Return whether a copy of a gradient takes less time than a call that reads it."""
    if type(gradient) is not Tensor or gradient.is_sparse:
        return False
    return gradient.numel() * gradient.itemsize <= _COPIED_BYTES


def measure_reduced(
    parameters: Mapping[str, Tensor],
    sketcher: Sketcher,
    read: ReadReduced,
    used: Container[str],  # parameters that have a gradient of this step
    into: GradientTotals,  # overwritten
    refs: GradientRefs = NO_REFS,  # gradients that were read together before the reduction
    left_out: Collection[str] = (),
    *,
    more: bool = False,  # they are added to what was read
) -> bool:
    """Measure the reduced gradient; return whether all of it was there."""
    if not more:
        into.reset()
    parameters = _without(parameters, left_out)
    names = tuple(parameters)
    gradients = list(map(_gradient_of, parameters.values()))
    if _lacks_any(gradients):
        there = [(n, g) for n, g in zip(names, gradients, strict=True) if g is not None]
        names = tuple(name for name, _ in there)
        gradients = [gradient for _, gradient in there]
        if any(name in used for name in parameters.keys() - set(names)):
            return False  # an optimizer inside the backward pass has taken it already
    if read is ReadReduced.NORM:
        sketcher.measure_norms(list(zip(names, gradients, strict=True)), into)
    else:
        names_before, gradients_before = refs
        again = names == names_before and all(map(is_, gradients, map(call, gradients_before)))
        sketcher.measure_tensors(names, gradients, into, again=again)
    return True


def _without(parameters: Mapping[str, Tensor], names: Collection[str]) -> Mapping[str, Tensor]:
    return {n: p for n, p in parameters.items() if n not in names} if names else parameters


def _lacks_any(gradients: Sequence[Tensor | None]) -> bool:
    return any(map(_is_none, gradients))
