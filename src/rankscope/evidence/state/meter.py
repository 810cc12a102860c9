"""Exact digests of a model's state, of some of it at a time.

Parameters, buffers, the optimizer's state and the gradients take turns, so that a step pays for a
small part of them, and all of them are compared within one rotation. A run's first steps have a
turn each, later every few steps have one, that reads so much more: what a turn costs besides its
reads is paid less often. What is read at a moment of a step is read together: by one call on the
host, by one launch on an accelerator.
"""

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rankscope.bus.pace import PACE
from rankscope.bus.replicas import StateKind
from rankscope.evidence.state.leaves import optimizer_state, signature, state_leaves
from rankscope.evidence.state.look import look_at
from rankscope.evidence.state.plan import DigestSchedule, Lasting, Slice, survey
from rankscope.evidence.state.readings import PendingDigests, PendingReading, Recurring, prepare
from rankscope.evidence.state.roles import is_looked_at
from rankscope.evidence.state.turn import NOTHING, PendingLook, PendingState, Seen, Turn
from rankscope.gradients.digest import digest_bits, word_of

_UNREADABLE = word_of("cannot be read")
_MASK = (1 << 64) - 1
_MOST_TURNS = 1024  # that are kept
_EACH_UNTIL = PACE.state_in_turn
"""Steps of a run that have a turn each: where its workers begin is compared at once."""
_MOST_UNSENT = 8
"""Steps without a broadcast of DDP's after which none is expected. One step has none after an
evaluation, whose own broadcast was before."""

_log = logging.getLogger("rankscope")


class StateMeter:
    """Digests some of a model's state at a time; all calls come on the training thread.

    No call waits for the device, raises, or changes anything. What cannot be read has a digest
    of its own, and a gradient that is missing has the digest 0.

    Args:
        module: The model, without what wraps it for data parallelism.
        optimizer: The optimizer; None if it is not known, or if its state is not replicated.
        replicated: Whether workers hold the same parameters; if not, only buffers are compared.
        reduces: Tells whether the gradient of a parameter is reduced at all; None if all are.
        left_out: Names of parameters and buffers that each worker may have for itself.
        broadcasts: Tells whether DDP has broadcast buffers before the forward pass that is about to
            enter the module; None where it never does.
        lasting: Tells what lasts of a parameter that is replaced while the model computes, and
            which parameters each worker may have for itself; None if all that hangs in it lasts.
        device: Where the model lives.
        max_items: Digests, at most, for each step.
        turns: Steps within which everything has its turn.
        spacing: Steps from turn to turn, once a run has begun.
        local_steps: So many steps in a row share a turn and have no spacing, so that what has a
            turn is read after an average of the workers' parameters; 0 for steps of their own.
        sums_by_hand: Whether some gradients may be summed over other axes of a mesh after the
            reduction; then it is not told which of them were changed.
        shards: Whether gradients of parameters that are not replicated are read, each worker's
            shards of them, for how they change between the reduction and the optimizer alone.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        replicated: bool,
        reduces: Callable[[Tensor], bool] | None = None,
        left_out: Container[str] = (),
        broadcasts: Callable[[], bool] | None = None,
        lasting: Lasting | None = None,
        device: torch.device | None = None,
        max_items: int = 32,
        turns: int = 64,
        spacing: int = 1,
        local_steps: int = 0,
        sums_by_hand: bool = False,
        shards: bool = False,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._reduces = reduces
        self._left_out = left_out
        self._broadcasts = broadcasts
        self._lasting = lasting
        self._new_plan = partial(
            DigestSchedule,
            replicated=replicated,
            shards=shards,
            called=optimizer is not None,
            turns=max(turns // spacing, 1),
            max_items=max_items * spacing,
        )
        self._spacing, self._local_steps = spacing, local_steps
        self._sums_by_hand = sums_by_hand
        self._alike = replicated
        self._plan: DigestSchedule | None = None
        self._signature: list[object] | None = None
        self._turns: dict[tuple[int, ...], Turn] = {}
        self._told = False
        self._unsent = 0
        self._turn = NOTHING
        self._seen = _nothing()
        self._first_step: int | None = None
        self._looks = False  # at the parameters, in this step
        self._look: PendingLook | None = None
        prepare(torch.device("cpu") if device is None else device)

    @property
    def wanted_names(self) -> Collection[str]:
        """Names of the parameters of which :meth:`see_local` wants to see the gradient."""
        return self._turn.wanted

    def begin_step(self, step: int) -> None:
        """Choose what to read in a step, at its first forward pass."""
        self._clear()
        self._first_step = step if self._first_step is None else self._first_step
        self._looks = is_looked_at(step, self._first_step)
        turn, between = (step, 0) if step < _EACH_UNTIL else divmod(step, self._spacing)
        if self._local_steps:
            turn, between = step // self._local_steps, 0
        if between:
            return
        try:
            if self._plan is None or turn % self._plan.length == 0:
                self._make_plan()
            assert self._plan is not None
            self._turn = self._turn_of(self._plan, turn)
        except Exception as error:  # a model that cannot be listed
            self._tell(error)

    def before_forward(self) -> None:
        """Count the steps in which DDP broadcasts no buffers: the first pass is about to begin."""
        if self._broadcasts is not None:
            self._unsent = 0 if self._broadcasts() else self._unsent + 1

    def enter_module(self) -> None:
        """Read running statistics if DDP has just broadcast them; the first time in a step counts.

        A forward pass after an evaluation finds them broadcast already, and reads nothing.
        """
        rows, seen = self._turn.broadcast, self._seen
        if self._broadcasts is None or not self._broadcasts():
            return
        self._unsent = 0
        if rows.slices and seen.broadcast is None:
            tensors = [part.place.current() for part in rows.slices]
            seen.broadcast = self._read(self._turn.recurring.broadcast, rows.slices, tensors)

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, before the reduction; the last one counts.

        Args:
            name: The parameter's canonical name.
            gradient: Any shape; it may be overwritten as soon as this returns.
        """
        if name not in self._turn.wanted:
            return
        if not gradient.is_cpu:
            self.see_locals(((name, gradient),))
            return
        for number, part in self._turn.wanted[name]:
            try:
                digest = digest_bits(gradient, part.start, part.stop).known & _MASK
            except Exception as error:  # whatever kind of tensor it is
                self._tell(error)
                digest = _UNREADABLE
            self._saw_local((number,), PendingReading([digest], [0.0]))

    def see_locals(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take local gradients of several parameters at once, each as in :meth:`see_local`."""
        if not self._turn.wanted:
            return
        shown = list(gradients)
        local = self._turn.local_of(tuple([name for name, _ in shown]))
        if not local.numbers:
            return
        tensors = [shown[source][1] for source in local.sources]
        self._saw_local(local.numbers, self._read(local.recurring, local.slices, tensors))
        self._seen.before = local.recurring

    def _saw_local(self, numbers: tuple[int, ...], reading: PendingReading) -> None:
        self._seen.local.pop(numbers, None)  # the last one counts
        self._seen.local[numbers] = reading

    def see_reduced(self) -> None:
        """Read gradients right after the reduction."""
        if self._turn is not NOTHING:
            self._read_gradients(StateKind.REDUCED, self._turn.reduced.slices)

    def see_applied(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run; its first call counts."""
        if self._turn is NOTHING or self._optimizer is None:
            return
        if StateKind.APPLIED not in self._seen.gradients:
            self._read_gradients(StateKind.APPLIED, self._turn.applied.slices)

    def see_state(self) -> None:
        """Read parameters, buffers and the optimizer's state, after the step."""
        if self._looks:
            self._look_at_parameters()
        turn, seen = self._turn, self._seen
        if turn is NOTHING:
            return
        known = turn.recurring
        tensors = [part.place.current(self._lasting) for part in turn.read]
        try:
            marks = self._add_kept(tensors, turn)
        except Exception:  # whatever an optimizer keeps: it is looked at one by one
            marks = None
        reading = self._begin_again(known.state, tensors) if marks == known.marks else None
        if reading is None:
            reading = self._read_state(turn, tensors, marks)
        seen.state, (seen.weights, seen.starts) = reading, known.leaves

    def _add_kept(self, tensors: list[Tensor | None], turn: Turn) -> list[object] | None:
        """Add what the optimizer keeps for a turn's parameters, where that is nothing but tensors.

        Args:
            tensors: Begins with the parameters.
            turn: The turn.

        Returns:
            What it is called; None if it is anything else.
        """
        states = getattr(self._optimizer, "state", None)
        marks: list[object] = []
        if not isinstance(states, dict):
            return None if turn.kept_of else marks
        for number in turn.kept_of:
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
        self, turn: Turn, tensors: list[Tensor | None], marks: list[object] | None
    ) -> PendingReading:
        """Look at all of a turn's state, and learn it for the next time, if it is like others'."""
        reading, known = PendingDigests(), turn.recurring
        for part, tensor in zip(turn.read, tensors, strict=False):
            if tensor is None:
                reading.add_word(0)
            else:
                self._add(reading, tensor, part)
        weights: list[int] = []
        starts = []
        for part in turn.optimizer.slices:
            starts.append(len(weights))
            self._add_optimizer(reading, weights, part)
        known.leaves = weights, starts
        known.marks = marks or []
        if marks is not None:
            known.state.learn(reading, tensors)
        return self._begin(reading)

    def collect(self) -> PendingState:
        """Return what was read since the step began, without waiting, and begin anew."""
        layout = None if self._plan is None else self._plan.layout
        turn, seen = self._turn, self._seen
        if turn is NOTHING:
            pending = PendingState(turn, seen, layout, look=self._look)
        else:
            if self._reduces is not None:
                seen.reduced = [self._is_reduced(part) for part in turn.reduced.slices]
            sent = self._unsent <= _MOST_UNSENT
            pending = PendingState(
                turn,
                seen,
                layout,
                sent=sent,
                look=self._look,
                tells_changed=not self._sums_by_hand,
                alike=self._alike,
            )
        self._clear()
        return pending

    def _clear(self) -> None:
        self._turn, self._seen = NOTHING, _nothing()
        self._looks, self._look = False, None

    def _look_at_parameters(self) -> None:
        """See how each parameter takes part in the training, and read those not reduced."""
        try:
            look = look_at(self._module, self._optimizer, self._left_out, self._lasting)
        except Exception as error:  # a model that cannot be listed
            self._tell(error)
            return
        reading = PendingDigests()
        for tensor in look.left_out.values():
            try:
                reading.add(tensor, 0, None)
            except Exception as error:  # whatever kind of tensor it is
                self._tell(error)
                reading.add_unreadable(_UNREADABLE)
        self._look = PendingLook(look.roles, tuple(look.left_out), self._begin(reading))

    def _make_plan(self) -> None:
        marks = signature(self._module, self._optimizer)
        if self._plan is not None and marks is not None and marks == self._signature:
            return
        found = survey(
            self._module,
            self._optimizer,
            self._left_out,
            self._lasting,
            broadcast=self._broadcasts is not None,
        )
        if self._plan is None or found != self._plan.found:
            self._plan = self._new_plan(found)
            self._turns.clear()
        self._signature = marks

    def _turn_of(self, plan: DigestSchedule, number: int) -> Turn:
        place = plan.place(number)
        turn = self._turns.get(place)
        if turn is None:
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            turn = self._turns[place] = Turn(plan.chosen(number))
        return turn

    def _is_reduced(self, part: Slice) -> bool:
        parameter = part.place.current(self._lasting)
        return parameter is None or self._reduces is None or self._reduces(parameter)

    def _read_gradients(self, kind: StateKind, slices: Sequence[Slice]) -> None:
        parameters = [part.place.current(self._lasting) for part in slices]
        gradients = [None if p is None else p.grad for p in parameters]
        recurring, seen = self._turn.recurring.gradients, self._seen
        seen.gradients[kind] = self._read(recurring, slices, gradients, norm=True)
        seen.before = recurring

    def _read(
        self,
        recurring: Recurring,
        slices: Sequence[Slice],
        tensors: Sequence[Tensor | None],
        *,
        norm: bool = False,
    ) -> PendingReading:
        """Read slices of tensors; what is missing has the digest 0."""
        again = self._begin_again(recurring, tensors, self._seen.before)
        if again is not None:
            return again
        reading = PendingDigests()
        for part, tensor in zip(slices, tensors, strict=True):
            if tensor is None:
                reading.add_word(0)
            else:
                self._add(reading, tensor, part, norm=norm)
        recurring.learn(reading, tensors)
        return self._begin(reading)

    def _begin_again(
        self,
        recurring: Recurring,
        tensors: Sequence[Tensor | None],
        before: Recurring | None = None,
    ) -> PendingReading | None:
        """Begin a reading that was learnt, of tensors like those; None if it cannot be."""
        try:
            return recurring.begin(tensors, before)
        except Exception:  # whatever they are: they are looked at one by one
            return None

    def _add_optimizer(self, reading: PendingDigests, weights: list[int], part: Slice) -> None:
        """Add what the optimizer keeps for a slice, if it keeps anything yet."""
        first = len(reading)
        try:
            parameter = part.place.current(self._lasting)
            state = None if parameter is None else optimizer_state(self._optimizer, parameter)
            for weight, leaf, start, stop in () if state is None else state_leaves(state, part):
                if isinstance(leaf, int):
                    reading.add_word(leaf)
                else:
                    reading.add(leaf, start, stop)
                weights.append(weight)
        except Exception as error:  # whatever an optimizer keeps
            self._tell(error)
            del weights[len(weights) - (len(reading) - first) :]
            reading.forget(first)
            reading.add_word(_UNREADABLE)
            weights.append(1)

    def _add(
        self, reading: PendingDigests, tensor: Tensor, part: Slice, *, norm: bool = False
    ) -> None:
        try:
            reading.add(tensor, part.start, part.stop, norm=norm)
        except Exception as error:  # whatever kind of tensor it is
            self._tell(error)
            reading.add_unreadable(_UNREADABLE)

    def _begin(self, reading: PendingDigests) -> PendingReading:
        try:
            return reading.begin()
        except Exception as error:  # of the device, or of the copy to the host
            self._tell(error)
            unread = PendingDigests()
            for _ in range(len(reading)):
                unread.add_unreadable(_UNREADABLE)
            return unread.begin()

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "some of the model's or the optimizer's state cannot be read, and is not compared "
                "between workers: %s: %s",
                type(error).__name__,
                error,
            )


def _nothing() -> Seen:
    return Seen(None, (), (), {}, None, {}, None)
