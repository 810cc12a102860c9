"""Exact digests of a model's state, of some of it at a time.

Each step reads one slot of the digest schedule: a small part of parameters, buffers, optimizer
state and gradients. All of them are compared within one cycle of the schedule. A run's first steps
have a slot each. Later only every few steps have one, which is larger, since a slot has a fixed
cost too. All reads at one moment of a step are one call on the host, one launch on an accelerator.
"""

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.bus.pace import PACE
from rankscope.bus.probe import Awaited, Probe, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.evidence.state.plan import (
    DigestSchedule,
    Slice,
    TensorLookup,
    is_sharded,
    optimizer_state,
    read_roles,
    replaced_parameters,
    signature,
    state_leaves,
    survey,
)
from rankscope.evidence.state.readings import (
    UNREADABLE,
    CachedReading,
    PendingDigests,
    PendingReading,
    prepare,
)
from rankscope.evidence.state.roles import Roles, is_role_step
from rankscope.evidence.state.slot import (
    NO_SLOT,
    DigestSlot,
    PendingState,
    StepReadings,
    with_digests,
)
from rankscope.gradients.digest import digest_bits
from rankscope.wrappers.optimizers import all_of

_MASK = (1 << 64) - 1
_MOST_SLOTS = 1024  # in memory
_MOST_IN_TURN = 16  # optimizers; more have a parameter or a layer each, and the first call counts
_SLOT_EACH_STEP = PACE.state_in_turn
"""Steps of a run that have a slot each, to compare the initial state at once."""
_ALONE_STEPS = 7
"""Steps in a row that share a slot where no reduction is seen: an average of the parameters shows
as a tensor that differs in one step and not in the next. A prime, as few averages come in its
multiples."""
_MOST_UNSENT = 8
"""Steps without a broadcast by DDP after which none is expected. One step has none after an
evaluation, which has already broadcast."""

_log = logging.getLogger("rankscope")


class StateMeter(Probe):
    """Digests some of a model's state at a time; all calls come on the training thread.

    The new state is read as soon as the model holds it, before the script may change it; where it
    holds it later, when the step is collected.

    No call waits for the device, raises, or changes anything. Unreadable tensors have a digest of
    their own, missing gradients the digest 0.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,  # None if unknown, or if its state is sharded
        *,
        replicated: bool,  # if not, only buffers are compared
        reduces: Callable[[Tensor], bool] | None = None,  # None if all gradients are reduced
        left_out: Container[str] = (),  # that each worker may have for itself
        broadcasts: Callable[[], bool] | None = None,  # buffers, by DDP, just now; None for never
        lookup: TensorLookup | None = None,  # None if all parameters last
        device: torch.device | None = None,  # where the model lives
        max_items: int = 32,  # digests, at most, for each step
        num_slots: int = 64,  # steps of one cycle of the digest schedule
        spacing: int = 1,  # steps from slot to slot, once a run has begun
        local_steps: int = 0,  # in a row that share a slot, so that one follows an average
        sums_by_hand: bool = False,  # over other axes of a mesh: later changes are not recorded
        shards: bool = False,  # read shards too, for changes after the reduction
        summed: Container[str] = (),  # names of parameters summed over other ranks in between
        sends_names: bool = False,  # of the digested items, which are equal on all workers
        updates_all: bool = False,  # the model holds the new state once ``optimizer.step`` returns
        held: Container[str] | None = None,  # names of the optimizer's, if ranks have shares
        by_loop: bool = False,  # the training reduces, at an unknown time before the optimizer
    ) -> None:
        self._module = module
        self._summed = summed
        self._optimizer = optimizer
        self._reduces = reduces
        self._left_out = left_out
        self._broadcasts = broadcasts
        self._lookup = lookup
        self._new_plan = partial(
            DigestSchedule,
            replicated=replicated,
            shards=shards,
            called=optimizer is not None,
            kept=optimizer is not None and not is_sharded(optimizer),
            num_slots=max(num_slots // spacing, 1),
            max_items=max_items * spacing,
        )
        self._spacing = spacing
        self._local_steps = local_steps
        self._alone = False  # whether each worker trains alone, as far as the root knows
        self._next: tuple[int, bool] | None = None  # step from which that changes
        self._known: set[int] | None = set() if sends_names else None
        self._updates_all = updates_all
        self._held = held
        self._by_loop = by_loop
        self._sums_by_hand = sums_by_hand
        self._replicated = replicated
        self._plan: DigestSchedule | None = None
        self._signature: list[object] | None = None
        self._slots: dict[tuple[int, ...], DigestSlot] = {}
        self._warned = False
        self._unsent = 0
        self._step = -1
        self._is_read = False
        self._slot = NO_SLOT
        self._seen = StepReadings()
        self._called: list[Any] = []  # optimizers, in this step
        self._first_step: int | None = None
        self._roles_due = False
        self._roles: Awaited[Roles] | None = None
        self._replaced: dict[str, Tensor] | None = None
        prepare(torch.device("cpu") if device is None else device)

    @property
    def wanted_names(self) -> Collection[str]:
        """Names of the parameters whose local gradient :meth:`see_local` reads."""
        return self._slot.wanted

    def begin_step(self, step: int, *, paused: bool = False) -> None:
        """Choose what to read in a step, at its first forward pass; read buffers."""
        if step == self._step:
            return
        self.abort()
        self._step = step
        if self._next is not None and step >= self._next[0]:
            self._alone = self._next[1]
            self._next = None
        self._first_step = step if self._first_step is None else self._first_step
        self._roles_due = is_role_step(step, self._first_step)
        number, between = (step, 0) if step < _SLOT_EACH_STEP else divmod(step, self._spacing)
        if self._local_steps or self._alone:
            number = step // (self._local_steps or _ALONE_STEPS)
            between = 0
        if between:
            return
        try:
            if self._plan is None or number % self._plan.length == 0:
                self._make_plan()
            assert self._plan is not None
            slot = self._slot = self._slot_of(self._plan, number)
            if slot.read_before:
                tensors = [part.place.current() for part in slot.read_before]
                self._seen.buffers = self._read(slot.cached.buffers, slot.read_before, tensors)
        except Exception as error:  # a model that cannot be listed
            self._warn_once(error)

    def on_request(self, step: int, content: bytes) -> None:
        """Read the same tensors in several steps from ``step`` on, or no longer."""
        self._next = step, content == b"alone"

    def before_forward(self, step: int, *, first: bool) -> None:
        """Count the steps in which DDP broadcasts no buffers: the first pass is about to begin."""
        if first and self._broadcasts is not None:
            self._unsent = 0 if self._broadcasts() else self._unsent + 1

    def enter_module(self) -> None:
        """Read running statistics if DDP has just broadcast them, once in a step."""
        rows = self._slot.broadcast
        seen = self._seen
        if self._broadcasts is None or not self._broadcasts():
            return
        self._unsent = 0
        if rows.slices and seen.broadcast is None:
            tensors = [part.place.current() for part in rows.slices]
            seen.broadcast = self._read(self._slot.cached.broadcast, rows.slices, tensors)

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Digest a local gradient, which may be overwritten then; the last one counts."""
        if name not in self._slot.wanted:
            return
        if not gradient.is_cpu:
            self.see_locals(((name, gradient),))
            return
        for number, part in self._slot.wanted[name]:
            try:
                digest = digest_bits(gradient, part.start, part.stop).known & _MASK
            except Exception as error:  # a tensor of an unusual kind
                self._warn_once(error)
                digest = UNREADABLE
            self._saw_local((number,), PendingReading([digest], [0.0]))

    def see_locals(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take local gradients of several parameters at once, each as in :meth:`see_local`."""
        if not self._slot.wanted:
            return
        shown = list(gradients)
        local = self._slot.local_of(tuple([name for name, _ in shown]))
        if not local.numbers:
            return
        tensors = [shown[source][1] for source in local.sources]
        self._saw_local(local.numbers, self._read(local.cached, local.slices, tensors))
        self._seen.before = local.cached

    def _saw_local(self, numbers: tuple[int, ...], reading: PendingReading) -> None:
        self._seen.local.pop(numbers, None)  # the last one counts
        self._seen.local[numbers] = reading

    def see_reduced(self) -> None:
        """Read gradients right after the reduction; in a loop, as its optimizers get them."""
        if self._by_loop and self._has_several:
            self._seen.reduced_in_turn = True
        elif self._slot is not NO_SLOT:
            self._read_gradients(StateKind.REDUCED, self._slot.reduced.slices)

    @property
    def _has_several(self) -> bool:
        """Whether several optimizers, not too many, are called one after the other."""
        return self._optimizer is not None and 1 < len(all_of(self._optimizer)) <= _MOST_IN_TURN

    def before_update(self, optimizer: Any) -> None:
        """Read gradients when ``optimizer.step`` is about to run; its first call counts.

        Several optimizers get theirs one after the other: a gradient scaler may unscale them so.
        """
        if self._roles_due:
            self._see_replaced()
        if self._slot is NO_SLOT or self._optimizer is None:
            return
        if self._has_several:
            self._read_in_turn(optimizer)
        elif StateKind.APPLIED not in self._seen.gradients:
            self._read_gradients(StateKind.APPLIED, self._slot.applied.slices)

    def _read_in_turn(self, optimizer: Any) -> None:
        """Read what was not read in the step, but for what optimizers that come later hold."""
        begun = self._seen.begun | _parameters_of([optimizer])
        apart = [_parameters_of([each]) for each in all_of(self._optimizer)]
        waiting = set().union(*(held for held in apart if not held & begun))
        self._seen.begun = begun
        slices = self._slot.applied.slices
        parameters = [part.place.current(self._lookup) for part in slices]
        due = [p if id(p) not in waiting | self._seen.applied else None for p in parameters]
        if all(p is None for p in due):
            return
        self._seen.applied |= {id(p) for p in due if p is not None}
        reading = PendingDigests()
        for part, gradient in zip(slices, self._held_gradients(slices, due), strict=True):
            self._add(reading, gradient, part.start, part.stop, norm=True)
        self._seen.in_turn.append(self._begin(reading))

    def see_state(self) -> None:
        """Read parameters and the optimizer's state, after the step."""
        if self._roles_due:
            self._read_roles()
        slot = self._slot
        seen = self._seen
        if slot is NO_SLOT:
            return
        cached = slot.cached
        tensors = [part.place.current(self._lookup) for part in slot.parameters.slices]
        try:
            marks = self._add_optimizer_states(tensors, slot)
        except Exception:  # unusual optimizer state: its parts are read one by one
            marks = None
        reading = self._begin_again(cached.state, tensors) if marks == cached.marks else None
        if reading is None:
            reading = self._read_state(slot, tensors, marks)
        seen.state = reading
        seen.weights, seen.starts = cached.leaves

    def _add_optimizer_states(
        self, tensors: list[Tensor | None], slot: DigestSlot
    ) -> list[object] | None:
        """Append a slot's optimizer state; return its names, or None if some may be no tensor."""
        states = getattr(self._optimizer, "state", None)
        marks: list[object] = []
        if not isinstance(states, dict):
            return None if slot.parameters_with_state else marks
        for number in slot.parameters_with_state:
            state = states.get(tensors[number])
            if state is None:
                marks.append(None)
                continue
            if type(state) is not dict:
                return None
            tensors += state.values()
            marks += (*state, len(state))
        return marks

    def _read_state(
        self, slot: DigestSlot, tensors: list[Tensor | None], marks: list[object] | None
    ) -> PendingReading:
        """Read all of a slot's state; cache the reading if it holds plain tensors only."""
        reading = PendingDigests()
        cached = slot.cached
        for part, tensor in zip(slot.parameters.slices, tensors, strict=False):
            self._add(reading, tensor, part.start, part.stop)
        weights: list[int] = []
        starts = []
        for part in slot.optimizer.slices:
            starts.append(len(weights))
            self._add_optimizer(reading, weights, part)
        cached.leaves = weights, starts
        cached.marks = marks or []
        if marks is not None:
            cached.state.learn(reading, tensors)
        return self._begin(reading)

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Read the new state, if it is complete; the last call counts."""
        self._called.append(optimizer)
        if complete and self._updates_all and not self._alone:  # else an average may follow
            self.see_state()
            self._is_read = True

    def collect(self, end: StepEnd) -> PendingState | None:
        """Read the rest, and return all readings of the step."""
        if not end.comparable:
            self.abort()
            return None
        self.begin_step(end.step)
        if not self._is_read:
            self.see_state()
        return self.take(set_aside=end.set_aside)

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._step = -1
        self._is_read = False
        self._slot = NO_SLOT
        self._seen = StepReadings()
        self._called = []
        self._roles_due = False
        self._roles = self._replaced = None

    def take(self, *, set_aside: bool = False) -> PendingState:
        """Return the readings of the step, without waiting, and start anew."""
        slot = self._slot
        seen = self._seen
        if self._reduces is not None:
            parameters = [part.place.current(self._lookup) for part in slot.reduced.slices]
            seen.reduced = [each is None or self._reduces(each) for each in parameters]
        pending = PendingState(
            slot,
            seen,
            layout=None if self._plan is None else self._plan.layout,
            roles=self._roles,
            sent=self._unsent <= _MOST_UNSENT,
            finds_changed=not self._sums_by_hand,
            replicated=self._replicated,
            summed=self._summed,
            resting=self._resting(slot),
            set_aside=set_aside,
            known=self._known,
        )
        self.abort()
        return pending

    def _resting(self, slot: DigestSlot) -> set[str]:
        """Return names of a slot's parameters whose optimizer the step did not call, as in GANs."""
        others = [each for each in all_of(self._optimizer) if each not in self._called]
        if not others or not self._called:
            return set()
        held = _parameters_of(others) - _parameters_of(self._called)
        places = [part.place for part in slot.applied.slices]
        return {place.name for place in places if id(place.current(self._lookup)) in held}

    def _see_replaced(self) -> None:
        """Look for parameters that the optimizer does not hold, at all of its calls in a step."""
        try:
            found = replaced_parameters(self._module, self._optimizer, self._lookup)
        except Exception as error:  # a model or an optimizer that cannot be listed
            self._warn_once(error)
            return
        before = found if self._replaced is None else self._replaced
        self._replaced = {name: tensor for name, tensor in before.items() if name in found}

    def _read_roles(self) -> None:
        """Read the role of each parameter, and the values of those not reduced."""
        try:
            roles, left_out = read_roles(
                self._module, self._optimizer, self._left_out, self._lookup
            )
        except Exception as error:  # a model that cannot be listed
            self._warn_once(error)
            return
        reading = PendingDigests()
        replaced = self._replaced or {}
        for tensor in (*left_out.values(), *replaced.values()):
            self._add(reading, tensor)
        begun = self._begin(reading)
        names = tuple(left_out), tuple(replaced)  # without the tensors
        self._roles = Awaited([begun], partial(with_digests, roles, *names, begun))

    def _make_plan(self) -> None:
        marks = signature(self._module, self._optimizer)
        if self._plan is not None and marks is not None and marks == self._signature:
            return
        found = survey(
            self._module,
            self._left_out,
            self._lookup,
            broadcast=self._broadcasts is not None,
        )
        if self._plan is None or found != self._plan.found:
            self._plan = self._new_plan(found)
            self._slots.clear()
        self._signature = marks

    def _slot_of(self, plan: DigestSchedule, number: int) -> DigestSlot:
        place = plan.place(number)
        slot = self._slots.get(place)
        if slot is None:
            if len(self._slots) >= _MOST_SLOTS:
                self._slots.clear()
            slot = self._slots[place] = DigestSlot(plan.items(number))
        return slot

    def _read_gradients(self, kind: StateKind, slices: Sequence[Slice]) -> None:
        parameters = [part.place.current(self._lookup) for part in slices]
        gradients = self._held_gradients(slices, parameters)
        cached = self._slot.cached.gradients
        self._seen.gradients[kind] = self._read(cached, slices, gradients, norm=True)
        self._seen.before = cached

    def _held_gradients(
        self, slices: Sequence[Slice], parameters: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return gradients; those of other ranks' shares may be what a reduction has left."""
        held = self._held
        pairs = zip(slices, parameters, strict=True)
        here = [p if held is None or part.place.name in held else None for part, p in pairs]
        return [None if p is None else p.grad for p in here]

    def _read(
        self,
        cached: CachedReading,
        slices: Sequence[Slice],
        tensors: Sequence[Tensor | None],
        *,
        norm: bool = False,
    ) -> PendingReading:
        """Read slices of tensors; missing tensors have the digest 0."""
        again = self._begin_again(cached, tensors, self._seen.before)
        if again is not None:
            return again
        reading = PendingDigests()
        for part, tensor in zip(slices, tensors, strict=True):
            self._add(reading, tensor, part.start, part.stop, norm=norm)
        cached.learn(reading, tensors)
        return self._begin(reading)

    def _begin_again(
        self,
        cached: CachedReading,
        tensors: Sequence[Tensor | None],
        before: CachedReading | None = None,
    ) -> PendingReading | None:
        """Begin a cached reading, if the tensors are like those before; else return None."""
        try:
            return cached.begin(tensors, before)
        except Exception:  # unusual tensors: they are read one by one
            return None

    def _add_optimizer(self, reading: PendingDigests, weights: list[int], part: Slice) -> None:
        """Add the optimizer state of a slice, if there is any yet."""
        first = len(reading)
        try:
            parameter = part.place.current(self._lookup)
            state = None if parameter is None else optimizer_state(self._optimizer, parameter)
            for weight, leaf, start, stop in () if state is None else state_leaves(state, part):
                if isinstance(leaf, int):
                    reading.add_word(leaf)
                else:
                    reading.add(leaf, start, stop)
                weights.append(weight)
        except Exception as error:  # unusual optimizer state
            self._warn_once(error)
            del weights[len(weights) - (len(reading) - first) :]
            reading.forget(first)
            reading.add_word(UNREADABLE)
            weights.append(1)

    def _add(
        self,
        reading: PendingDigests,
        tensor: Tensor | None,
        start: int = 0,
        stop: int | None = None,
        *,
        norm: bool = False,
    ) -> None:
        if tensor is None:
            reading.add_word(0)
            return
        try:
            reading.add(tensor, start, stop, norm=norm)
        except Exception as error:  # a tensor of an unusual kind
            self._warn_once(error)
            reading.add_unreadable()

    def _begin(self, reading: PendingDigests) -> PendingReading:
        try:
            return reading.begin()
        except Exception as error:  # of the device, or of the copy to the host
            self._warn_once(error)
            unread = PendingDigests()
            for _ in range(len(reading)):
                unread.add_unreadable()
            return unread.begin()

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            words = (
                "some of the model's or the optimizer's state cannot be read, and is not compared"
            )
            _log.warning("%s between workers: %s: %s", words, type(error).__name__, error)


def _parameters_of(optimizers: Iterable[Any]) -> set[int]:
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}
