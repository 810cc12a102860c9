"""The base of the taps that read gradients by a hook on each parameter, or without one.

Most hooks only count: gradients are read together at the end of a backward pass
(:mod:`rankscope.wrappers.ddp_reading`), and once that is known to work, most hooks are taken
out.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from enum import IntEnum, auto
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.accumulator import AccumulatorAudit
from rankscope.wrappers.ddp_reading import LocalReading, measure_reduced
from rankscope.wrappers.parts import MicroBatches
from rankscope.wrappers.passes import BackwardEnd
from rankscope.wrappers.tap import GradientObserver, GradientTap, Guarded, ReadReduced
from rankscope.wrappers.untraced import untraced


class PassPhase(IntEnum):
    """How far a backward pass has come; one that raises stays there until it is forgotten."""

    IDLE = auto()  # none runs, and no forward pass waits for one
    AWAITED = auto()  # a forward pass waits for its backward pass
    BEGUN = auto()  # the awaited one runs, and has reached no parameter
    UNAWAITED = auto()  # one for which no forward pass waits runs, and has reached no parameter
    READING = auto()  # it has reached a parameter that is measured


class PassEvent(IntEnum):
    """What may move a backward pass to another phase."""

    FORWARD = auto()  # a forward pass in training begins
    NOTICE = auto()  # a hook shows that a backward pass runs
    GRADIENT = auto()  # the first one
    LEAVE = auto()  # the pass ends, or is forgotten
    OPTIMIZER = auto()  # an optimizer ends the step


PASS_MOVES: Mapping[PassEvent, Mapping[PassPhase, PassPhase]] = {
    PassEvent.FORWARD: dict.fromkeys(PassPhase, PassPhase.AWAITED),
    PassEvent.NOTICE: {
        PassPhase.IDLE: PassPhase.UNAWAITED,
        PassPhase.AWAITED: PassPhase.BEGUN,
    },
    PassEvent.GRADIENT: {
        PassPhase.BEGUN: PassPhase.READING,
        PassPhase.UNAWAITED: PassPhase.READING,
    },
    PassEvent.LEAVE: {
        PassPhase.BEGUN: PassPhase.AWAITED,
        PassPhase.UNAWAITED: PassPhase.IDLE,
        PassPhase.READING: PassPhase.IDLE,
    },
    PassEvent.OPTIMIZER: {PassPhase.AWAITED: PassPhase.IDLE},
}
"""The life of a backward pass: where an event moves it; no effect in a phase that is not listed."""


class HookCalls:
    """Which parameters' hooks are called in the backward passes of a step, and how often.

    Reentrant checkpointing of a shared parameter calls its hook once per use, and the last call
    sees the whole gradient. A pass that is not measured shows their number.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}  # where it is not 1
        self._counts: Counter[str] = Counter()  # in this pass
        self._before: set[str] = set()  # in earlier passes of the step

    @property
    def names(self) -> KeysView[str]:
        """The parameters whose hooks were called in the last pass."""
        return self._counts.keys()

    @property
    def whole(self) -> bool:
        """Whether the last pass saw every parameter that the step's earlier passes saw.

        A parameter that only earlier micro-batches used was not read in the last one.
        """
        return self._before <= self._counts.keys()

    def reset(self) -> None:
        """Begin a step."""
        self._counts.clear()
        self._before.clear()

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._before |= self._counts.keys()
        self._counts.clear()

    def last_of(self, name: str) -> bool:
        """Count a call; return whether it sees the whole gradient."""
        self._counts[name] += 1
        return self._counts[name] == self._expected.get(name, 1)

    def add(self, names: Iterable[str]) -> None:
        """Count many calls."""
        self._counts.update(names)

    def see_without(self, names: Iterable[str]) -> None:
        """Count one call in the pass for each of these parameters, and none for others."""
        self._counts.clear()
        self._counts.update(names)

    def end_pass(self, late: Collection[str] = ()) -> bool:
        """End a backward pass; return whether a parameter was not called as often as expected.

        The number does not matter for those that are read ``late``, and not in their hooks.
        """
        several = {name: count for name, count in self._counts.items() if count > 1}
        absent = {n: count for n, count in self._expected.items() if n not in self._counts}
        expected, self._expected = self._expected, absent | several
        if expected == self._expected:
            return False
        differ = expected.items() ^ self._expected.items()
        return any(name not in late for name, _ in differ)


class GradientHooks:
    """A hook on each parameter's gradient, once it has been accumulated, or on a few of them."""

    def __init__(
        self, parameters: Mapping[str, Tensor], on_gradient: Callable[[str, Tensor], None]
    ) -> None:
        self._parameters = parameters
        self._on_gradient = on_gradient
        self._handles: dict[str, RemovableHandle] = {}
        self.all = True  # no parameter is without its hook
        self._kept: Collection[str] = ()
        self.keep(tuple(parameters))

    def keep(self, names: Collection[str]) -> None:
        """Have hooks on these parameters alone from now on."""
        if names is self._kept:
            return
        self._kept = names
        wanted = set(names)
        for name in self._handles.keys() - wanted:
            self._handles.pop(name).remove()
        for name in [name for name in names if name not in self._handles]:
            hook = partial(self._on_gradient, name)
            parameter: Any = self._parameters[name]
            self._handles[name] = parameter.register_post_accumulate_grad_hook(hook)
        self.all = len(wanted) == len(self._parameters)

    def go_first(self) -> Collection[str]:
        """Run before all other such hooks; return the names of the parameters that have some."""
        crowded = []
        for name, handle in self._handles.items():
            hooks = getattr(self._parameters[name], "_post_accumulate_grad_hooks", None)
            if isinstance(hooks, dict) and len(hooks) > 1 and handle.id in hooks:
                others = [number for number in hooks if number != handle.id]
                for number in others:  # torch calls them in the order of insertion
                    hooks[number] = hooks.pop(number)
                crowded.append(name)
        return crowded

    def remove(self) -> None:
        """Take all hooks out."""
        self.keep(())


class HookedTap(GradientTap):
    """A :class:`~rankscope.wrappers.tap.GradientTap` with hooks on parameters.

    ``unawaited`` is called in the hook of a backward pass's first gradient, if the pass was not
    noticed before (argument False), or no forward pass waited for it (True): it may announce one.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],  # that require a gradient, by the sketcher's names
        sketcher: Sketcher,
        guarded: Guarded,
        *,
        reduced: ReadReduced,
        observer: GradientObserver,  # gets local gradients, and a call after their reduction
        in_buckets: bool = False,  # gradients are moved into buckets once their hooks are done
        unawaited: Callable[[bool], None] = lambda noticed: None,
    ) -> None:
        self._parameters = parameters
        self._all = tuple(parameters)
        self._sketcher = sketcher
        self._guarded = guarded
        self._observer = observer
        self._backward = BackwardEnd(self._on_begin, self._finish, guarded, self._on_ending)
        self._reading = LocalReading(parameters, sketcher, observer, in_buckets=in_buckets)
        self._reduced = None if reduced is ReadReduced.OFF else sketcher.new_totals()
        self._measure_reduced = partial(measure_reduced, parameters, sketcher, reduced)
        self._micro = MicroBatches()
        self._accumulator = AccumulatorAudit(parameters, sketcher)
        self._calls = HookCalls()
        self._counted: list[str] = []  # calls of hooks that only count, in this pass
        self._phase = PassPhase.IDLE
        self._noticed = False  # a backward pass since the last forward pass, at the model's output
        self._unnoticed = False  # the last one began before that, as in another part of the model
        self._measure = False
        self._announce: Callable[[], None] | None = None  # of the pass that runs
        self._reached: list[Callable[[], None]] = []  # called if it trains
        self._unawaited = unawaited
        self._left_out: Collection[str] = ()  # of this step
        self._hooks = GradientHooks(parameters, self._on_gradient)

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output."""
        begun = self._phase is PassPhase.READING
        self._backward.notice()
        self._noticed = True
        self._reached.append(trained)
        if self._accumulates:
            self._accumulator.begin_pass(self._reading.totals, measure=self._measure, begun=begun)

    def notice_unannounced(self, announce: Callable[[], None]) -> None:
        """Note that the running backward pass has reached a forward pass in evaluation mode.

        Nothing comes of it when no parameter takes part, or one that was announced does as well.
        """
        if self._phase is PassPhase.IDLE:
            self._announce = announce
            self._hooks.keep(self._all)
            Variable._execution_engine.queue_callback(self._forget_unannounced)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass was announced whose backward pass has not begun."""
        return self._phase in (PassPhase.AWAITED, PassPhase.BEGUN)

    def leave_out(self, names: Collection[str]) -> None:
        """Measure the step that begins without some parameters."""
        self._left_out = self._reading.left_out = names

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since :meth:`collect` and never ended: it raised."""
        return self._backward.running

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._hooks.remove()

    @property
    def _accumulates(self) -> bool:
        """Whether gradients of several micro-batches add up where they are read."""
        return True

    def _move(self, event: PassEvent) -> None:
        self._phase = PASS_MOVES[event].get(self._phase, self._phase)

    def _leave_pass(self) -> None:
        self._move(PassEvent.LEAVE)
        self._backward.begin()

    def _await_pass(self) -> None:
        """Begin a forward pass, which waits for its backward pass; forget one that did not end."""
        self._leave_pass()
        self._reading.forget()
        self._move(PassEvent.FORWARD)

    def _begin_step_anew(self) -> None:
        self._leave_pass()
        self._reading.forget()
        self._micro.reset()
        self._accumulator.reset()
        self._calls.reset()
        self.leave_out(())

    def _carried_over(self, first: str) -> Tensor | None:
        """Begin a step in its first pass; return whether it adds to an older gradient."""
        held = self._reading.begin_step(first)
        return self._sketcher.holds_any(held, whole=self._reading.held_at_ends)

    def _read_pass(self) -> None:
        """Read the local gradients at the end of a backward pass."""
        if not self._hooks.all:
            self._calls.see_without(self._measured(self._reading.with_gradient()))
        else:
            self._calls.add(self._measured(self._counted))
        self._reading.end_pass(self._calls.names)

    def _measured(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names without those that the step leaves out."""
        left_out = self._left_out
        return [name for name in names if name not in left_out] if left_out else names

    def _is_training(self) -> bool:
        """Return whether the pass that ends was the training's; call ``trained`` then."""
        if self._phase is not PassPhase.READING:  # the training wanted other gradients
            self._accumulator.drop_pass()
            return False
        for trained in self._reached:
            trained()
        return True

    @untraced
    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if name in self._reading.late:
            self._counted.append(name)
        elif self._accumulates:
            self._guarded(partial(self._see, name, parameter.grad))

    def _on_begin(self) -> None:
        self._move(PassEvent.NOTICE)
        self._reached.clear()

    def _finish(self) -> None:
        self._on_end()
        self._move(PassEvent.LEAVE)  # last: Ctrl-C in between leaves an aborted pass

    def _see(self, name: str, gradient: Tensor | None) -> None:
        """Read a gradient in its hook."""
        if self._phase not in (PassPhase.READING, PassPhase.BEGUN):
            self._begin_unawaited()
        if name in self._left_out:
            return
        if self._phase is not PassPhase.READING:
            self._counted.clear()
            self._calls.begin_pass()
            self._begin_pass(name)
            self._move(PassEvent.GRADIENT)
        self._take(name, gradient, last=self._calls.last_of(name))

    def _begin_unawaited(self) -> None:
        """Begin a backward pass that has reached a parameter, and that nothing has announced."""
        noticed = self._phase is PassPhase.UNAWAITED
        reached = list(self._reached) if noticed else []
        self._leave_pass()
        announce, self._announce = self._announce, None
        if announce is None:
            self._unawaited(noticed)
        else:
            announce()
        self._backward.notice()
        self._reached += reached

    @untraced
    def _forget_unannounced(self) -> None:
        self._announce = None

    @abstractmethod
    def _begin_pass(self, first: str) -> None:
        """Begin a backward pass, in the hook of its first gradient."""

    @abstractmethod
    def _take(self, name: str, gradient: Tensor | None, *, last: bool) -> None:
        """Read a gradient, which the training may have taken away.

        The hook of a shared parameter may be called several times: the last one sees all of it.
        """

    @abstractmethod
    def _on_ending(self) -> None:
        """Note that a backward pass is about to end, before any reduction is finished."""

    @abstractmethod
    def _on_end(self) -> None:
        """Note that it has ended."""
