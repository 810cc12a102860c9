"""The local gradient under ``DistributedDataParallel``, read before DDP copies it to a bucket.

The tap is a post-accumulate hook per parameter. Unlike a communication hook it leaves DDP's own
path alone, which keeps every bit of the training as it was (a communication hook changes bits at
W = 3: DDP then divides at another place). It sees the accumulated local gradient with bucket
views, ``no_sync``, static graphs, unused parameters, compiled models, activation checkpointing and
any communication hook.

Where the training itself ends the reduction (``require_manual_backward_finalization``), the reduced
gradient is not read: it may be there before the backward pass ends, or after.

Under ``rankscope.order_free`` nothing accumulates: each micro-batch's gradient is shown before it
is taken away (:mod:`rankscope.capture.alone`), and measured as a part of the whole.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankscope.capture.alone import alone_gradients
from rankscope.capture.backward import BackwardEnd
from rankscope.capture.busy import BusyClock
from rankscope.capture.join import ShadowSteps
from rankscope.capture.micro import MicroBatches
from rankscope.capture.parts_alone import PartsAlone
from rankscope.capture.reduced_product import ReducedProduct, can_watch_copies
from rankscope.capture.sketch import Sketcher
from rankscope.capture.tap import Guarded, LocalGradient, ReadReduced
from rankscope.capture.totals import GradientTotals
from rankscope.capture.witness import GradientWitness

_LOOKED_AT = 64  # elements of each parameter that tell whether a gradient was zeroed


class DDPTap:
    """A :class:`~rankscope.capture.tap.GradientTap` for DDP.

    Args:
        model: The wrapped model.
        parameters: The parameters that require a gradient, by the names that the sketcher knows.
        sketcher: Measures the gradients.
        guarded: Keeps the monitor's exceptions out of the backward pass.
        reduced: What to read of the reduced gradient.
        witness: Is shown local gradients, and told when they have been reduced.
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
        witness: GradientWitness,
        shadowed: Callable[[], None],
    ) -> None:
        self._witness = witness
        self._model = model
        self._parameters = parameters
        self._sketcher = sketcher
        self._guarded = guarded
        self._read_reduced = reduced
        self._backward = BackwardEnd(self._on_begin, self._on_end, guarded, self._on_ending)
        self._totals = sketcher.new_totals()
        self._reduced = None if reduced is ReadReduced.OFF else sketcher.new_totals()
        self._product: ReducedProduct | None = None
        if _product_is_asked_for(model, sketcher, reduced):
            self._product = ReducedProduct(parameters, sketcher.device, guarded)
        self._reduced_product: Tensor | None = None
        self._micro = MicroBatches()
        self._calls = _HookCalls()
        self._busy = BusyClock(model, sketcher.device)
        self._carried_over: Tensor | None = None
        self._first = True  # the next gradient is the first of its backward pass
        self._fresh = False  # a forward pass waits for its backward pass
        self._begun = self._reduced_known = self._spoiled = False
        self._settled = False  # the step's reduction is over
        self._due = self._measure = self._synchronises = False
        self._bypassed = self._through_ddp = self._unreduced = False
        self._announce: Callable[[], None] | None = None  # of the backward pass that runs
        self._reached: list[Callable[[], None]] = []  # to be called if it trains
        self._alone: PartsAlone | None = None
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, name)
            )
            for name, parameter in parameters.items()
        ]
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
        self._through_ddp |= not bypassed
        self._bypassed = not self._through_ddp
        self._find_alone()
        self._backward.begin()
        self._fresh = True
        self._synchronises = self._bypassed or self._model.require_backward_grad_sync
        # Norms do not add up over micro-batches, so without sketches the last one says it all.
        adds_up = self._sketcher.sketches or self._alone is not None
        self._measure = measure and (self._synchronises or adds_up)
        self._due = measure

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Say, from inside it, that a backward pass has reached what the model returned."""
        self._backward.notice()
        self._reached.append(trained)

    def notice_unannounced(self, announce: Callable[[], None]) -> None:
        """Say, from inside it, that a backward pass has reached a forward pass in evaluation mode.

        Nothing comes of it when no parameter takes part, or one that was announced does as well.
        """
        if not self._fresh and not self._backward.running:
            self._announce = announce
            Variable._execution_engine.queue_callback(self._forget_unannounced)

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has ended since the last :meth:`collect`."""
        return self._synchronises and not self._fresh and not self._backward.running

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._backward.running

    @property
    def busy_seconds(self) -> float:
        """How long this worker was busy before it began to wait for the others; NaN if unknown."""
        return self._busy.seconds if self.complete else math.nan

    def collect(self) -> LocalGradient | None:
        """Return what was measured, and start again; None when nothing valid was measured."""
        gradient = None
        valid = self.complete and self._settled and self._is_whole() and not self._spoiled
        if valid and self._measure:
            known = self._reduced is not None and self._reduced_known
            reduced = self._reduced.clone() if self._reduced is not None and known else None
            gradient = self._gradient(reduced)
        self._start_again()
        return gradient

    def _is_whole(self) -> bool:
        return self._calls.whole if self._alone is None else self._alone.valid

    def _gradient(self, reduced: GradientTotals | None) -> LocalGradient:
        if self._alone is not None:
            return self._alone.gradient(reduced, self._carried_over)
        return LocalGradient(
            self._totals.clone(),
            reduced,
            self._micro.squared_norms(),
            self._carried_over,
            reduced_product=self._reduced_product,
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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._shadow.remove()
        self._busy.remove()

    def _start_again(self) -> None:
        self._busy.begin_step(reduced=self.complete)
        self._backward.begin()
        self._micro.reset()
        if self._alone is not None:
            self._alone.reset()
        self._calls.reset()
        self._carried_over = self._reduced_product = None
        self._begun = self._reduced_known = self._spoiled = False
        self._settled = self._synchronises = False
        self._through_ddp = self._bypassed = False

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if self._alone is None:
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
        if not last and self._alone is None:
            return
        if gradient is not None:
            self._witness.see_local(name, gradient)
        if not self._measure:
            return
        if gradient is None:  # a hook of the training's has taken it away
            self._spoiled = True
        elif self._alone is not None:
            self._alone.parts.measure(name, gradient)
        else:
            self._sketcher.measure(name, gradient, self._totals)

    def _begin_pass(self, name: str) -> None:
        """Begin a backward pass whose first gradient is that of ``name``."""
        self._fresh = False
        self._calls.begin_pass()
        self._spoiled = self._spoiled or self._settled  # it adds to a gradient that was reduced
        if self._due and not self._begun:
            self._begun = True
            others = [p.grad for n, p in self._parameters.items() if n != name]
            self._carried_over = _any_nonzero([g for g in others if g is not None])
        if self._measure:
            self._totals.reset()

    def _on_ending(self) -> None:
        """See the reduced gradient take the place of the local one."""
        sees = self._measure and self._synchronises and self._alone is None and not self._first
        if self._product is not None and sees and not self._waits_by_hand:
            self._product.watch()

    def _on_end(self) -> None:
        """Close a backward pass, after the reduction if it has one."""
        if self._first:
            return  # no parameter took part: the training asked for other gradients
        for trained in self._reached:
            trained()
        self._settled = self._synchronises
        self._unreduced = self._bypassed or not self._synchronises
        reduced = self._synchronises and not self._waits_by_hand
        if self._synchronises:
            self._busy.see_reduced()
        if reduced:
            self._witness.see_reduced()
        self._spoiled = (self._calls.end_pass() and self._alone is None) or self._spoiled
        if not self._measure:
            return
        if self._alone is not None:
            self._alone.end_pass()
        else:
            self._micro.add(self._totals, last=self._synchronises)
        if reduced and self._product is not None:
            self._reduced_product = self._product.take(self._calls)
        if reduced and self._reduced is not None:
            self._measure_reduced(self._reduced)

    @property
    def _waits_by_hand(self) -> bool:
        """Whether the training itself waits for the reduction, before or after the pass ends."""
        return bool(getattr(self._model, "require_manual_backward_finalization", False))

    def _measure_reduced(self, into: GradientTotals) -> None:
        into.reset()
        gradients: list[tuple[str, Tensor]] = []
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                gradients.append((name, gradient))
            elif name in self._calls:
                return  # an optimizer inside the backward pass has taken it already
        if self._read_reduced is ReadReduced.NORM:
            self._sketcher.measure_norms(gradients, into)
        else:
            for name, gradient in gradients:
                self._sketcher.measure(name, gradient, into)
        self._reduced_known = True


def _product_is_asked_for(
    model: DistributedDataParallel, sketcher: Sketcher, reduced: ReadReduced
) -> bool:
    """Return whether only the inner product with the reduced gradient tells directions.

    Of two workers, norms tell it as well. With bucket views, DDP reduces in the very memory that
    holds the local gradient.
    """
    needed = not sketcher.sketches and reduced is not ReadReduced.OFF
    if not needed or model.process_group.size() <= 2 or model.gradient_as_bucket_view:
        return False
    return can_watch_copies()


def _any_nonzero(gradients: list[Tensor]) -> Tensor | None:
    """Return whether any gradient holds something, going by the first elements of each."""
    samples = []
    for gradient in gradients:
        sample = gradient.detach()
        if sample.is_sparse:
            sample = sample._values()
        while sample.dim() > 1 and sample.numel():
            sample = sample[0]
        samples.append(sample.reshape(-1)[:_LOOKED_AT].any())
    return torch.stack(samples).any() if samples else None


class _HookCalls:
    """Which parameters' hooks are called in the backward passes of a step, and how often.

    Reentrant checkpointing of a shared parameter calls its hook once per use, and the last call
    sees the whole gradient. How many there are is learnt from a pass that is not measured.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}  # where it is not 1
        self._counts: dict[str, int] = {}  # in this pass
        self._before: set[str] = set()  # in earlier passes of the step

    def __contains__(self, name: object) -> bool:
        return name in self._counts

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
        """Take a call; return whether it is the one that sees the whole gradient."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return count == self._expected.get(name, 1)

    def end_pass(self) -> bool:
        """End a backward pass; return whether a parameter was not called as often as expected."""
        several = {name: count for name, count in self._counts.items() if count > 1}
        absent = {n: count for n, count in self._expected.items() if n not in self._counts}
        expected, self._expected = self._expected, absent | several
        return expected != self._expected
