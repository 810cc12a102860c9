"""The local gradient under ``DistributedDataParallel``, read before the reduction replaces it.

The tap is a post-accumulate hook per parameter, most of which only count: gradients are read
together (:mod:`rankscope.capture.taps.ddp_reading`), and once that is known to work, most hooks
are taken out. Unlike a communication hook it leaves DDP's
own path alone, which keeps every bit of the training as it was (a communication hook changes bits
at W = 3: DDP then divides at another place). It sees the accumulated local gradient with bucket
views, ``no_sync``, static graphs, unused parameters, compiled models, activation checkpointing and
any communication hook.

Where the training itself ends the reduction (``require_manual_backward_finalization``), the reduced
gradient is not read: it may be there before the backward pass ends, or after.

Without ``no_sync``, each micro-batch's backward pass reduces, and adds to what the one before has
left. The sketch of a reduced gradient, taken out of the next local one, leaves what the worker has
added; norms are estimates then.

Under ``rankscope.order_free`` nothing accumulates: each micro-batch's gradient is shown before it
is taken away (:mod:`rankscope.capture.taps.alone`), and measured as a part of the whole.
"""

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture.passes import BackwardEnd, in_backward
from rankscope.capture.sketch import Sketcher
from rankscope.capture.taps.accumulator import AccumulatorAudit
from rankscope.capture.taps.alone import PartsAlone, alone_gradients
from rankscope.capture.taps.ddp_reading import LocalReading, measure_reduced
from rankscope.capture.taps.ddp_step import (
    BusyClock,
    GradientHooks,
    HookCalls,
    ShadowSteps,
    StepState,
)
from rankscope.capture.taps.parts import MicroBatches
from rankscope.capture.taps.reduced_product import ReducedProduct, product_is_asked_for
from rankscope.capture.taps.tap import (
    GradientObserver,
    GradientTap,
    Guarded,
    LocalGradient,
    ReadReduced,
)
from rankscope.capture.totals import GradientTotals


class DDPTap(GradientTap):
    """A :class:`~rankscope.capture.taps.tap.GradientTap` for DDP.

    Args:
        model: The wrapped model.
        parameters: The parameters that require a gradient, by the names that the sketcher knows.
        sketcher: Measures the gradients.
        guarded: Keeps the monitor's exceptions out of the backward pass.
        reduced: What to read of the reduced gradient.
        observer: Is shown local gradients, and told when they have been reduced.
        shadowed: Called after each synchronising step that this rank only shadows, since it has
            run out of data inside ``model.join()``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: dict[str, Tensor],
        sketcher: Sketcher,
        guarded: Guarded,
        *,
        reduced: ReadReduced,
        observer: GradientObserver,
        shadowed: Callable[[], None],
    ) -> None:
        self._observer = observer
        self._model = model
        self._parameters, self._all = parameters, tuple(parameters)
        self._sketcher = sketcher
        self._guarded = guarded
        self._backward = BackwardEnd(self._on_begin, self._on_end, guarded, self._on_ending)
        in_buckets = model.gradient_as_bucket_view
        self._reading = LocalReading(parameters, sketcher, observer, in_buckets=in_buckets)
        self._reduced = None if reduced is ReadReduced.OFF else sketcher.new_totals()
        self._product: ReducedProduct | None = None
        if product_is_asked_for(model, sketcher, reduced):
            self._product = ReducedProduct(parameters, sketcher.device, guarded)
        self._subtracts = reduced is ReadReduced.SKETCH and sketcher.sketches
        self._measure_reduced = partial(measure_reduced, parameters, sketcher, reduced)
        self._micro = MicroBatches()
        self._accumulator = AccumulatorAudit(parameters, sketcher)
        self._calls = HookCalls()
        self._counted: list[str] = []  # calls of hooks that only count, in this pass
        self._busy = BusyClock(model, sketcher.device)
        self._step = StepState()
        self._first = True  # the next gradient is the first of its backward pass
        self._fresh = False  # a forward pass waits for its backward pass
        self._due = self._measure = self._bypassed = self._unreduced = False
        self._announce: Callable[[], None] | None = None  # of the pass that runs
        self._reached: list[Callable[[], None]] = []  # to be called if it trains
        self._alone: PartsAlone | None = None
        self._hooks = GradientHooks(parameters, self._on_gradient)
        self._noticed = False  # the backward pass, before its first gradient
        self._shadow = ShadowSteps(model, shadowed)

    @property
    def reduced_copies(self) -> int:
        """Every rank holds the whole reduced gradient."""
        return self._model.process_group.size()

    @property
    def unreduced(self) -> bool:
        """Whether the gradients hold something that no reduction has seen."""
        return self._unreduced

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training. DDP decides here whether backward synchronises.

        One that goes past DDP, to the module inside, makes a step of its own that nothing reduces;
        unless the same step goes through DDP as well, which then reduces what both have left.
        """
        self._step.through_ddp |= not bypassed
        self._bypassed = not self._step.through_ddp
        self._find_alone()
        self._choose_hooks()
        self._backward.begin()
        self._reading.forget()
        self._fresh = True
        self._step.synchronises = self._bypassed or self._model.require_backward_grad_sync
        # Norms do not add up over micro-batches, so without sketches the last one says it all.
        adds_up = self._sketcher.sketches or self._alone is not None
        self._measure = measure and (self._step.synchronises or adds_up)
        self._due = measure

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Say, from inside it, that a backward pass has reached what the model returned."""
        begun = self._backward.running and not self._first
        self._backward.notice()
        self._noticed = True
        self._reached.append(trained)
        if self._alone is None:
            before, measure = self._reading.totals, self._measure
            self._accumulator.begin_pass(before, measure=measure, begun=begun)

    def notice_unannounced(self, announce: Callable[[], None]) -> None:
        """Say, from inside it, that a backward pass has reached a forward pass in evaluation mode.

        Nothing comes of it when no parameter takes part, or one that was announced does as well.
        """
        if not self._fresh and not self._backward.running:
            self._announce = announce
            self._hooks.keep(self._all)
            Variable._execution_engine.queue_callback(self._forget_unannounced)

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has ended since the last :meth:`collect`."""
        return self._step.synchronises and not self._fresh and not self._backward.running

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._backward.running

    @property
    def busy_seconds(self) -> float:
        """How long this worker was busy before it began to wait for the others, or NaN."""
        return self._busy.seconds if self.complete else math.nan

    def collect(self) -> LocalGradient | None:
        """Return what was measured, and start again; None when nothing valid was measured."""
        gradient = None
        step = self._step
        valid = self.complete and step.settled and not step.spoiled
        valid = valid and (self._calls.whole if self._alone is None else self._alone.valid)
        if valid and self._measure:
            gradient = self._gradient(self._reduced if step.reduced_known else None)
        self._start_again()
        return gradient

    def _gradient(self, reduced: GradientTotals | None) -> LocalGradient:
        if self._alone is not None:
            return self._alone.gradient(reduced, self._step.carried_over)
        step, totals = self._step, self._reading.totals
        if step.earlier is not None:
            totals = totals.clone()
            totals.add(step.earlier)
            totals.estimate_norms()
            return LocalGradient(totals, reduced, None, step.carried_over, norm_estimated=True)
        return LocalGradient(
            totals,
            reduced,
            self._micro.squared_norms(),
            step.carried_over,
            reduced_product=step.reduced_product,
            kept=self._accumulator.collect(),
        )

    def _find_alone(self) -> None:
        """See whether a reduction takes the gradients away one by one by now."""
        found = alone_gradients(self._model)
        if self._alone is None and found is not None:
            self._alone = PartsAlone(found, self._sketcher)
            names = {id(parameter): name for name, parameter in self._parameters.items()}

            def see(parameter: Tensor, gradient: Tensor) -> None:
                name = names.get(id(parameter))
                if name is not None:
                    self._guarded(partial(self._see, name, gradient))

            self._alone.watch(see)

    def remove(self) -> None:
        """Take all hooks out of the model."""
        if self._alone is not None:
            self._alone.remove()
        self._hooks.remove()
        self._shadow.remove()
        self._busy.remove()

    def _choose_hooks(self) -> None:
        """Have as few hooks as the next backward pass needs, unless one runs."""
        if in_backward():
            return
        several = self._alone is None and self._noticed
        reduces = self._model.require_backward_grad_sync
        self._hooks.keep(self._reading.hooked(synchronises=reduces) if several else self._all)
        self._noticed = False

    def _start_again(self) -> None:
        self._busy.begin_step(reduced=self.complete)
        self._backward.begin()
        self._micro.reset()
        self._accumulator.reset()
        if self._alone is not None:
            self._alone.reset()
        self._reading.forget()
        self._calls.reset()
        self._step = StepState()
        self._bypassed = False

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if name in self._reading.late:
            self._counted.append(name)
        elif self._alone is None:
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
        self._busy.see_gradient()
        self._backward.notice()
        if self._first:
            self._first = False
            self._begin_pass(name)
        last = self._calls.last_of(name)
        if self._alone is None and last:
            self._reading.take(name, gradient)
        elif self._alone is not None and gradient is not None:
            if name in self._observer.wanted_names:
                self._observer.see_local(name, gradient)
            if self._measure:
                self._alone.parts.measure(name, gradient)

    def _begin_pass(self, name: str) -> None:
        """Begin a backward pass whose first gradient is that of ``name``."""
        step = self._step
        self._counted.clear()
        self._calls.begin_pass()
        if step.settled:
            self._add_to_reduced()
        self._fresh = False
        step.spoiled |= not (self._hooks.all or self._noticed)  # it may be reduced by now
        if self._alone is None:
            synchronises = step.synchronises and not self._bypassed
            self._reading.begin_pass(name, measure=self._measure, synchronises=synchronises)
        if self._due and not step.begun:
            step.begun = True
            held = self._reading.begin_step(name)
            step.carried_over = self._sketcher.holds_any(held, whole=self._reading.held_at_ends)

    def _add_to_reduced(self) -> None:
        """Keep what this worker has added so far: the pass adds to a gradient that was reduced."""
        step, reduced = self._step, self._reduced
        known = self._fresh and self._measure and step.reduced_known and self._alone is None
        if reduced is None or not (known and self._subtracts):
            step.spoiled = True
            return
        added = self._reading.totals.clone()
        added.subtract(reduced)
        if step.earlier is not None:
            added.add(step.earlier)
        step.earlier, step.settled, step.reduced_known = added, False, False

    def _on_ending(self) -> None:
        """Read the local gradients, and see the reduced ones take their place."""
        if self._first or self._alone is not None:
            return
        self._busy.see_gradient()
        if self._hooks.all:
            self._calls.add(self._counted)
        else:
            self._calls.see_without(self._reading.with_gradient())
        self._reading.end_pass(self._calls.names)
        reduces = self._step.synchronises and not self._waits_by_hand
        if self._product is not None and self._measure and reduces:
            self._product.watch()

    def _on_end(self) -> None:
        """Close a backward pass, after the reduction if it has one."""
        if self._first:  # no parameter took part: the training asked for other gradients
            self._accumulator.drop_pass()
            return
        for trained in self._reached:
            trained()
        step = self._step
        step.settled = step.synchronises
        self._unreduced = self._bypassed or not step.synchronises
        reduced = step.synchronises and not self._waits_by_hand
        if step.synchronises:
            self._busy.see_reduced()
        if reduced:
            self._observer.see_reduced()
        unexpected = self._calls.end_pass(self._reading.read_late)
        step.spoiled |= (unexpected and self._alone is None) or self._reading.spoiled
        together = self._reading.take_together()
        goes_on = self._measure and not (step.synchronises or step.spoiled)
        self._accumulator.end_pass(self._calls.names, goes_on=goes_on)
        if not self._measure:
            return
        if self._alone is not None:
            self._alone.end_pass()
        else:
            self._micro.add(self._reading.totals, last=step.synchronises)
        if reduced and self._product is not None:
            step.reduced_product = self._product.take(self._calls.names)
        if reduced and self._reduced is not None:
            step.reduced_known = self._measure_reduced(
                self._calls.names, into=self._reduced, together=together
            )

    @property
    def _waits_by_hand(self) -> bool:
        return bool(vars(self._model).get("require_manual_backward_finalization", False))
