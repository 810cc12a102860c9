"""The local gradient of a model without wrapper, whose training reduces gradients itself.

No reduction begins inside the backward pass, but for one that hooks of the training's start there.
So what a backward pass has left is the local gradient, with all that the step's earlier passes have
added: it is read together at the end of each pass (:mod:`rankscope.capture.taps.ddp_reading`). A
parameter that has hooks of the training's is read in a hook that runs before these.

The step ends with the optimizer's call, and what is in ``.grad`` then is taken for the reduced
gradient. Whether it is a mean, a sum or something else, or still each worker's own since the
optimizer reduces, shows where workers are compared (:mod:`rankscope.core.own_reduction`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from rankscope.capture.passes import BackwardEnd, in_backward
from rankscope.capture.sketch import Sketcher
from rankscope.capture.taps.accumulator import AccumulatorAudit
from rankscope.capture.taps.ddp_reading import LocalReading, measure_reduced
from rankscope.capture.taps.ddp_step import GradientHooks, HookCalls
from rankscope.capture.taps.parts import MicroBatches
from rankscope.capture.taps.tap import (
    GradientObserver,
    GradientTap,
    Guarded,
    LocalGradient,
    ReadReduced,
)


class LoopTap(GradientTap):
    """A :class:`~rankscope.capture.taps.tap.GradientTap` for a bare module.

    Args:
        parameters: The parameters that require a gradient, by the names that the sketcher knows.
        num_workers: W.
        sketcher: Measures the gradients.
        guarded: Keeps the monitor's exceptions out of the training.
        reduced: What to read of the reduced gradient.
        observer: Is shown local gradients, and told when the optimizer is about to be called.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        num_workers: int,
        sketcher: Sketcher,
        guarded: Guarded,
        *,
        reduced: ReadReduced,
        observer: GradientObserver,
    ) -> None:
        self._parameters, self._all = parameters, tuple(parameters)
        self._num_workers, self._sketcher = num_workers, sketcher
        self._guarded, self._observer = guarded, observer
        self._backward = BackwardEnd(self._on_begin, self._on_end, guarded, self._on_ending)
        self._reading = LocalReading(parameters, sketcher, observer, in_buckets=False)
        self._reduced = None if reduced is ReadReduced.OFF else sketcher.new_totals()
        self._measure_reduced = partial(measure_reduced, parameters, sketcher, reduced)
        self._micro = MicroBatches()
        self._accumulator = AccumulatorAudit(parameters, sketcher)
        self._calls = HookCalls()
        self._counted: list[str] = []  # calls of hooks that only count, in this pass
        self._first = True  # the next gradient is the first of its backward pass
        self._fresh = self._noticed = self._measure = False
        self._announce: Callable[[], None] | None = None  # of the pass that runs
        self._reached: list[Callable[[], None]] = []  # to be called if it trains
        self._hooks = GradientHooks(parameters, self._on_gradient)
        self._looked_for_others = False
        self._start_step()

    def _start_step(self) -> None:
        self._begun = self._ended = self._settled = self._reduced_known = self._spoiled = False
        self._carried_over: Tensor | None = None
        self._left: tuple[Tensor, int] | None = None  # a parameter, and its gradient's version
        self._num_passes = 0

    @property
    def reduced_copies(self) -> int:
        """Every rank is taken to hold the whole reduced gradient."""
        return self._num_workers

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training whose backward pass will follow."""
        self._choose_hooks()
        self._backward.begin()
        self._reading.forget()
        self._fresh, self._measure = True, measure

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Say, from inside it, that a backward pass has reached what the model returned."""
        begun = self._backward.running and not self._first
        self._backward.notice()
        self._noticed = True
        self._reached.append(trained)
        self._accumulator.begin_pass(self._reading.totals, measure=self._measure, begun=begun)

    def notice_unannounced(self, announce: Callable[[], None]) -> None:
        """Say, from inside it, that a backward pass has reached a forward pass in evaluation mode.

        Nothing comes of it when no parameter takes part, or one that was announced does as well.
        """
        if not self._fresh and not self._backward.running:
            self._announce = announce
            self._hooks.keep(self._all)
            Variable._execution_engine.queue_callback(self._forget_unannounced)

    def see_optimizer(self) -> None:
        """Read the reduced gradient, at the first call of an optimizer after a backward pass."""
        if not self._ended or self._settled or self._backward.running:
            return
        self._settled, self._fresh = True, False
        self._observer.see_reduced()
        if self._measure and self._reduced is not None:
            self._reduced_known = self._measure_reduced(self._calls.names, into=self._reduced)

    @property
    def complete(self) -> bool:
        """Whether the optimizer was called after a backward pass, or its gradient thrown away.

        A gradient scaler that sees an infinity calls no optimizer; the training throws the
        gradient away, and the next forward pass begins another step. On an accelerator, only one
        that is taken away is known to be, not one that is zeroed in place.
        """
        if self._backward.running or self._fresh or not self._ended:
            return False
        return self._settled or self._is_thrown_away()

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since :meth:`collect` and never ended: it raised."""
        return self._backward.running

    def collect(self) -> LocalGradient | None:
        """Return what was measured, and start again; None when nothing valid was measured."""
        gradient = None
        if self.complete and self._measure and self._calls.whole and not self._spoiled:
            gradient = LocalGradient(
                self._reading.totals,
                self._reduced if self._reduced_known else None,
                self._micro.squared_norms() if self._num_passes > 1 else None,
                self._carried_over,
                kept=self._accumulator.collect(),
            )
        self._backward.begin()
        self._micro.reset()
        self._accumulator.reset()
        self._reading.forget()
        self._calls.reset()
        self._start_step()
        return gradient

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._hooks.remove()

    def _is_thrown_away(self) -> bool:
        if self._left is None:
            return False
        parameter, version = self._left
        gradient = parameter.grad
        if gradient is None:
            return True
        readable = gradient.is_cpu and not gradient.is_sparse and gradient._version != version
        return readable and not bool(gradient.any())

    def _choose_hooks(self) -> None:
        """Have as few hooks as the next backward pass needs, unless one runs."""
        if in_backward():
            return
        if not self._looked_for_others:
            self._looked_for_others = True
            self._reading.never_late = self._hooks.go_first()
        self._hooks.keep(self._reading.hooked(synchronises=False) if self._noticed else self._all)
        self._noticed = False

    def _on_gradient(self, name: str, parameter: Any) -> None:
        if name in self._reading.late:
            self._counted.append(name)
        else:
            self._guarded(partial(self._see, name, parameter.grad))

    def _forget_unannounced(self) -> None:
        self._announce = None

    def _on_begin(self) -> None:
        self._first = True
        self._reached.clear()

    def _see(self, name: str, gradient: Tensor | None) -> None:
        announce, self._announce = self._announce, None
        if announce is not None:
            announce()
        self._backward.notice()
        if self._first:
            self._first = False
            self._begin_pass(name)
        if self._calls.last_of(name):
            self._reading.take(name, gradient)

    def _begin_pass(self, name: str) -> None:
        """Begin a backward pass whose first gradient is that of ``name``."""
        self._counted.clear()
        self._calls.begin_pass()
        self._fresh = False
        self._spoiled |= self._settled  # it adds to what the optimizer was given
        self._spoiled |= not (self._hooks.all or self._noticed)
        self._reading.begin_pass(name, measure=self._measure, synchronises=False)
        if self._measure and not self._begun:
            self._begun = True
            held = self._reading.begin_step(name)
            self._carried_over = self._sketcher.holds_any(held, whole=self._reading.held_at_ends)

    def _on_ending(self) -> None:
        """Read the local gradients at the end of a backward pass."""
        if self._first:
            return
        if self._hooks.all:
            self._calls.add(self._counted)
        else:
            self._calls.see_without(self._reading.with_gradient())
        self._reading.end_pass(self._calls.names)

    def _on_end(self) -> None:
        """Close a backward pass."""
        if self._first:  # no parameter took part: the training asked for other gradients
            self._accumulator.drop_pass()
            return
        for trained in self._reached:
            trained()
        unexpected = self._calls.end_pass(self._reading.read_late)
        self._spoiled |= unexpected or self._reading.spoiled
        self._reading.take_together()
        self._ended = True
        self._num_passes += 1
        parameters = (self._parameters[name] for name in self._calls.names)
        self._left = next(((p, p.grad._version) for p in parameters if p.grad is not None), None)
        goes_on = self._measure and not self._spoiled
        self._accumulator.end_pass(self._calls.names, goes_on=goes_on)
        if self._measure:
            self._micro.add(self._reading.totals, last=False)
