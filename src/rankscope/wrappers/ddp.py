"""The local gradient under ``DistributedDataParallel``, read before the reduction replaces it.

The tap is a post-accumulate hook per parameter, most of which only count: gradients are read
together (:mod:`rankscope.wrappers.ddp_reading`), and once that is known to work, most hooks are
taken out. Unlike a communication hook it leaves DDP's own path alone, so every bit of the training
stays as it was (a communication hook changes bits at W = 3: DDP then divides elsewhere). It sees
the accumulated local gradient with bucket views, ``no_sync``, static graphs, unused parameters,
compiled models, activation checkpointing and any communication hook.

Where the training itself ends the reduction (``require_manual_backward_finalization``), the reduced
gradient is not read: it may be there before the backward pass ends, or after. Nor is it where a
training that prepares the reduction has a communication hook, which may keep the result elsewhere.

Without ``no_sync``, each micro-batch's backward pass reduces, and adds to the gradient that the
last one has reduced. The sketch of that reduced gradient, subtracted from the next local one,
leaves the worker's own part; norms are estimates then.

Under ``rankscope.order_free`` nothing accumulates: each micro-batch's gradient is measured as a
part of the whole, before it is taken away (:mod:`rankscope.wrappers.parts`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.hooked import HookedTap, PassPhase
from rankscope.wrappers.parts import StreamReader, streams
from rankscope.wrappers.tap import LocalGradient, ReadReduced, TapPlan

_BROADCAST = Relay(DistributedDataParallel, "_sync_buffers", untraced=True)
_SHADOWED = Relay(DistributedDataParallel, "_match_all_reduce_for_bwd_pass")


class StepRoute(Enum):
    """Which way the forward passes of a step go: from NONE to PAST_DDP, and from both to DDP."""

    NONE = auto()
    PAST_DDP = auto()  # to the module inside: nothing reduces the step
    DDP = auto()  # one at least, whose reduction takes all


@dataclass(slots=True)
class StepState:
    """The state of the step that runs; there is a new one for each."""

    begun: bool = False  # a backward pass that is due has begun
    carried_over: Tensor | None = None  # see LocalGradient
    route: StepRoute = StepRoute.NONE
    synchronises: bool = False  # the last forward pass is one whose backward pass reduces
    settled: bool = False  # the reduction is over
    reduced_known: bool = False  # the reduced gradient was read
    earlier: GradientTotals | None = None  # this worker's part of what was reduced, then added to
    spoiled: bool = False  # the measurements are not those of the step's local gradient


class BusyClock:
    """Times a worker's own work under DDP between two reductions, before it waits for the others.

    Wall time per step is the same on all workers, since all wait for the slowest. They differ in
    the time from the end of one reduction to the last local gradient before the next one.

    The host's clock shows it on the CPU alone: an accelerator works asynchronously. Where DDP
    broadcasts buffers before a forward pass, the time of that broadcast is left out, since workers
    wait there for rank 0.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self._model = ref(model)
        self._on_host = device.type == "cpu" and _BROADCAST.exists
        self._free_at: float | None = None  # when the last reduction had ended
        self._ready_at = math.nan
        self._broadcast_at = 0.0
        self._broadcasting = 0.0
        self._seconds: float | None = None
        self._stop = _BROADCAST.subscribe(before=self._begin_broadcast, after=self._end_broadcast)

    @property
    def seconds(self) -> float:
        """How long this worker was busy in the step that has just been reduced; NaN if unknown."""
        return math.nan if self._seconds is None else self._seconds

    def see_gradient(self) -> None:
        """Note that a local gradient is ready; the last call before the reduction counts."""
        self._ready_at = time.perf_counter()

    def see_reduced(self) -> None:
        """Note that a reduction has ended: of every worker's gradient, at about one time."""
        free_at, self._free_at = self._free_at, time.perf_counter()
        before = self._seconds or 0.0  # of other reductions in this step
        if free_at is None or not self._on_host or self._waits_elsewhere():
            self._seconds = math.nan
        else:
            self._seconds = before + self._ready_at - free_at - self._broadcasting
        self._broadcasting = 0.0

    def begin_step(self, *, reduced: bool) -> None:
        """Begin another step; without a reduction, its time since the last one is not known."""
        self._seconds = None
        if not reduced:
            self._free_at = None

    def remove(self) -> None:
        """Stop timing broadcasts; a second call does nothing."""
        self._stop()

    def _begin_broadcast(self, model: object) -> None:
        self._broadcast_at = time.perf_counter()

    def _end_broadcast(self, model: object) -> None:
        if model is self._model():
            self._broadcasting += time.perf_counter() - self._broadcast_at

    def _waits_elsewhere(self) -> bool:
        """Return whether DDP may have waited for other workers inside the backward pass.

        A communication hook may wait for one bucket before it starts the next, as that of
        ``fixed_order`` does. From a ``join()`` on, the first gradient waits until all workers have
        begun their forward pass.
        """
        model = self._model()
        join = getattr(model, "_join_config", None)
        return bool(getattr(model, "_comm_hooks", True) or getattr(join, "enable", False))


class DDPTap(HookedTap):
    """A :class:`~rankscope.wrappers.tap.GradientTap` for DDP.

    Of several wrappers, which are of parts of one training, the first is timed.
    """

    def __init__(
        self,
        wrapped: Any,  # a DDPModel
        plan: TapPlan,
    ) -> None:
        models: Sequence[DistributedDataParallel] = wrapped.ddps
        parameters: dict[str, Tensor] = wrapped.parameters
        model = models[0]
        sketcher = plan.sketcher
        in_buckets = any(each.gradient_as_bucket_view for each in models)
        super().__init__(parameters, plan, in_buckets=in_buckets)
        self._model = model
        self._models = tuple(models)
        self._subtracts = plan.reduced is ReadReduced.SKETCH and sketcher.sketches
        self._busy = BusyClock(model, sketcher.device)
        self._step = StepState()
        self.reduced_copies = model.process_group.size()
        self._due = False
        self._left: tuple[Tensor, int] | None = None  # a parameter, and its version after a pass
        self._prepared_late = False  # the reduction, after the forward pass
        self._stream: StreamReader | None = None
        self._shadowed = plan.shadowed
        self._stop_shadowing = _SHADOWED.subscribe(after=self._see_shadowed)

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training. DDP decides here whether backward synchronises.

        One that goes past DDP, to the module inside, makes a step of its own that nothing reduces;
        unless the same step goes through DDP as well, which then reduces the sum of both.
        """
        if not bypassed:
            self._step.route = StepRoute.DDP
        elif self._step.route is StepRoute.NONE:
            self._step.route = StepRoute.PAST_DDP
        self._find_stream()
        several = self._stream is None and not self._prepared_late
        self._choose_hooks(reads_late=several, synchronises=self._reduces)
        self._await_pass()
        self._step.synchronises = self._step.route is StepRoute.PAST_DDP or self._reduces
        # Norms do not add up over micro-batches, so without sketches the last one alone counts.
        adds_up = self._sketcher.sketches or self._stream is not None
        self._measure = measure and (self._step.synchronises or adds_up)
        self._due = measure

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output."""
        left, self._left = self._left, None
        self.begins_anew = left is not None and left[0].grad is None and left[0]._version != left[1]
        if self.begins_anew:
            self._micro.reset()
            self._accumulator.reset()
        super().notice_backward(trained)

    def drop_gradient(self) -> None:
        """Drop what was measured in the step: its gradient was thrown away."""
        step = self._step
        self._step = StepState(route=step.route, synchronises=step.synchronises)
        self._micro.reset()
        self._accumulator.reset()
        self._calls.reset()

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has ended since the last :meth:`collect`."""
        return self._step.synchronises and self._phase is PassPhase.IDLE

    @property
    def busy_seconds(self) -> float:
        """How long this worker was busy before it began to wait for the others, or NaN."""
        return self._busy.seconds if self.complete else math.nan

    def _gradient(self) -> LocalGradient | None:
        step = self._step
        stream = self._stream
        whole = self._calls.whole if stream is None else stream.parts.adds_up
        if not (whole and step.settled) or step.spoiled:
            return None
        reduced = self._reduced if step.reduced_known else None
        if stream is not None:
            return stream.gradient(reduced, step.carried_over)
        totals = self._reading.totals
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
            accumulator_changes=self._accumulator.collect(),
        )

    def _find_stream(self) -> None:
        """Look whether a reduction takes the gradients away one by one by now."""
        found = streams.get(self._model)
        if self._stream is None and found is not None:
            self._stream = StreamReader(found, self._sketcher)
            names = {id(parameter): name for name, parameter in self._parameters.items()}

            def see(parameter: Tensor, gradient: Tensor) -> None:
                name = names.get(id(parameter))
                if name is not None:
                    self._guarded(partial(self._see, name, gradient))

            self._stream.watch(see)

    def remove(self) -> None:
        """Take all hooks out of the model."""
        if self._stream is not None:
            self._stream.remove()
        super().remove()
        self._stop_shadowing()
        self._busy.remove()

    @property
    def _accumulates(self) -> bool:
        return self._stream is None

    def _start_again(self) -> None:
        self._busy.begin_step(reduced=self.complete)
        super()._start_again()
        if self._stream is not None:
            self._stream.reset()
        self._step = StepState()

    def _see_shadowed(self, model: object) -> None:
        """Note a step that this rank only shadows, out of data in ``model.join()``.

        No hook fires in it: DDP calls the reduction itself.
        """
        if model is self._model:
            self._shadowed()

    def _take(self, name: str, gradient: Tensor | None, *, last: bool) -> None:
        self._busy.see_gradient()
        if self._stream is None and last:
            self._reading.take(name, gradient)
        elif self._stream is not None and gradient is not None:
            if name in self._observer.wanted_names:
                self._observer.see_local(name, gradient)
            if self._measure:
                self._stream.parts.measure(name, gradient)

    def _begin_pass(self, first: str) -> None:
        step = self._step
        if step.settled:
            self._add_to_reduced()
        if not step.synchronises and any(
            # DDP turns the second off in a forward pass inside ``no_sync``. A training that
            # prepares the reduction by itself after that pass, such as nanotron's, turns both on.
            model.require_backward_grad_sync and model.require_forward_param_sync
            for model in self._models
        ):
            step.synchronises = self._prepared_late = True
            step.spoiled |= not self._hooks.all
            self._measure = self._due
        self._unnoticed = not self._noticed
        step.spoiled |= self._unnoticed and not self._hooks.all  # it may be reduced by now
        if self._stream is None:
            synchronises = step.synchronises and step.route is not StepRoute.PAST_DDP
            self._reading.begin_pass(first, measure=self._measure, synchronises=synchronises)
        if self._due and not step.begun:
            step.begun = True
            step.carried_over = self._carried_over(first)

    def _add_to_reduced(self) -> None:
        """Keep this worker's part so far: the pass adds to a gradient that was reduced."""
        step = self._step
        reduced = self._reduced
        known = (
            self.awaits_backward and self._measure and step.reduced_known and self._stream is None
        )
        if reduced is None or not (known and self._subtracts):
            step.spoiled = True
            return
        added = self._reading.totals.clone()
        added.subtract(reduced)
        if step.earlier is not None:
            added.add(step.earlier)
        step.earlier = added
        step.settled = False
        step.reduced_known = False

    def _on_ending(self) -> None:
        """Read the local gradients."""
        if self._phase is not PassPhase.READING or self._stream is not None:
            return
        self._busy.see_gradient()
        self._read_pass()

    def _on_end(self) -> None:
        """Close a backward pass, after the reduction if it has one."""
        if not self._is_training():
            return
        step = self._step
        step.settled = step.synchronises
        self._left = None if step.synchronises else self._parameter_left()
        self.unreduced = step.route is StepRoute.PAST_DDP or not step.synchronises
        reduced = step.synchronises and not self._reduced_elsewhere
        if step.synchronises:
            self._busy.see_reduced()
        if reduced:
            self._see_reduced()
        unexpected = self._calls.end_pass(self._reading.read_late)
        step.spoiled |= (unexpected and self._stream is None) or self._reading.spoiled
        refs = self._reading.take_refs()
        goes_on = self._measure and not (step.synchronises or step.spoiled)
        self._accumulator.end_pass(
            self._accumulator.reading(self._calls.names) if goes_on else None
        )
        if not self._measure:
            return
        if self._stream is not None:
            self._stream.end_pass()
        else:
            self._micro.add(self._reading.totals, last=step.synchronises)
        if reduced and self._reduced is not None:
            step.reduced_known = self._measure_reduced(
                self._calls.names, into=self._reduced, refs=refs, left_out=self._left_out
            )

    def _parameter_left(self) -> tuple[Tensor, int] | None:
        """Return a parameter to whose gradient the pass has added, and its version."""
        parameters = map(self._parameters.__getitem__, self._calls.names)
        return next(((p, p._version) for p in parameters if p.grad is not None), None)

    @property
    def _reduces(self) -> bool:
        return any(model.require_backward_grad_sync for model in self._models)

    @property
    def _reduced_elsewhere(self) -> bool:
        """Whether the end of a backward pass may not show the reduced gradient."""
        if self._prepared_late and any(getattr(m, "_comm_hooks", ()) for m in self._models):
            return True  # such as nanotron's, which adds up and reduces in float32
        name = "require_manual_backward_finalization"
        return any(vars(model).get(name, False) for model in self._models)
