"""Collects one worker's steps, each from its first forward pass on.

A step ends with the backward pass that synchronises gradients, but the optimizer's call and the
time belong to it, too. So a step is closed when the next one's first forward pass begins. If each
micro-batch's backward pass synchronises, the optimizer's call ends the step.

A training that never leaves ``no_sync`` has no such pass. There, from the second call of the
optimizer on, each call closes a step; from the first one on, where the plan has local steps.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rankscope.bus.pace import Intervals
from rankscope.bus.probe import EVENTS, Evaluated, Job, Pending, Probe, StepEnd, overriding
from rankscope.evidence import EVIDENCE
from rankscope.gradients.host import begin_copies
from rankscope.session.instruments import Instruments
from rankscope.session.outbox import LocalStep
from rankscope.wrappers.accumulation import Accumulation
from rankscope.wrappers.clipping import CLIP
from rankscope.wrappers.find import is_training
from rankscope.wrappers.guard import Guard
from rankscope.wrappers.living import one_walk
from rankscope.wrappers.part_calls import PartCall
from rankscope.wrappers.passes import ForwardPasses, tensors_in
from rankscope.wrappers.pipelining import ScheduleCalls
from rankscope.wrappers.surroundings import traced
from rankscope.wrappers.tap import GradientTap, TapPlan
from rankscope.wrappers.transfer import begin_transfer
from rankscope.wrappers.untraced import untraced
from rankscope.wrappers.wrapped import is_compiled, takes_hooks

_log = logging.getLogger("rankscope")

_MOST_PASSES = 8192  # most forward passes of one step; the data of more would only fill the memory


class Phase(IntEnum):
    """How far a step has come."""

    OPEN = auto()  # no reduction is known of, and no optimizer was called
    REDUCED = auto()  # gradients were reduced, and may wait for more of them
    UPDATED = auto()  # an optimizer was called, and no reduction is known of
    APPLIED = auto()  # gradients were reduced, and an optimizer was called
    LEAVING = auto()  # it is handed over, once more where Ctrl-C cuts that short


class Event(IntEnum):
    """What may move a step to another phase."""

    REDUCTION = auto()  # a forward pass begins after a backward pass that reduces
    OPTIMIZER_BEGINS = auto()
    OPTIMIZER_ENDS = auto()
    FORGET = auto()  # the data so far is dropped
    HAND_OVER = auto()


MOVES: Mapping[Event, Mapping[Phase, Phase]] = {
    Event.REDUCTION: {Phase.OPEN: Phase.REDUCED, Phase.UPDATED: Phase.APPLIED},
    Event.OPTIMIZER_BEGINS: {Phase.UPDATED: Phase.OPEN, Phase.APPLIED: Phase.REDUCED},
    Event.OPTIMIZER_ENDS: {Phase.OPEN: Phase.UPDATED, Phase.REDUCED: Phase.APPLIED},
    Event.FORGET: dict.fromkeys((Phase.REDUCED, Phase.UPDATED, Phase.APPLIED), Phase.OPEN),
    Event.HAND_OVER: dict.fromkeys(set(Phase) - {Phase.LEAVING}, Phase.LEAVING),
}
"""The life of a step: where an event moves it; it has no effect in a phase that is not listed."""


@dataclass(slots=True)
class _StepSoFar:
    """What a step has seen so far; the next one begins with a new one."""

    phase: Phase = Phase.OPEN
    unreduced: bool = False  # an optimizer was called with gradients that nothing had reduced
    left_over: bool | None = None  # it adds to gradients that were applied; None: not known yet

    def move(self, event: Event) -> None:
        """Move to the phase that the event leads to."""
        self.phase = MOVES[event].get(self.phase, self.phase)

    @property
    def over(self) -> bool:
        """Whether the next forward pass belongs to the next step."""
        return self.updated or self.phase is Phase.LEAVING

    @property
    def updated(self) -> bool:
        """Whether an optimizer was called, and no other call has begun since."""
        return self.phase in (Phase.UPDATED, Phase.APPLIED)


class StepCollector:
    """Collects one worker's steps, one after the other; all calls come on the training thread.

    ``send`` is called with each closed step.
    """

    def __init__(
        self,
        instruments: Instruments,
        job: Job,  # without its guard
        guard: Guard,
        send: Callable[[LocalStep], None],
    ) -> None:
        job = replace(job, guard=guard, leave_out=guard.leave_out)
        optimizer = job.optimizer
        self.step = job.first_step
        self.paused = False  # gradients are not measured
        self.by_backward = False  # a backward pass has begun the last micro-batch
        self.unseen = False  # the training has trained on what no forward pass had returned
        self._evaluating = False  # the training runs in evaluation mode
        self._evaluated = False  # a pass in evaluation mode may prove to be trained on
        self._runs_model = False  # a probe runs the model
        self._noted: set[str] = set()  # what is noted once in a session
        self.intervals = Intervals(job.every)
        self._guard = guard
        self._send = send
        self._take_read_seconds = instruments.sketcher.take_seconds
        self._module = job.wrapped.module
        self._later_seconds = 0.0  # of the present call, that count for the next step
        made = {each.name: each.make_probes(job) for each in EVIDENCE}
        self._probes: dict[str, Probe] = {name: some[0] for name, some in made.items() if some}
        probes: list[Probe] = [one for some in made.values() for one in some]
        self._calls = {name: overriding(probes, name) for name in EVENTS}
        self._runners: list[Probe] = [call.__self__ for call in self._calls["run_model"]]
        self._recomputes: list[Probe] = [call.__self__ for call in self._calls["recompute"]]
        self._so_far = _StepSoFar()
        self._updates_alone = 0  # since gradients were synchronised for the last time
        self._local = job.local_steps > 0  # updates alone are steps of their own
        self._accumulation: Accumulation | None = None
        self._stop_listening: Callable[[], object] = lambda: None
        if optimizer is not None:
            self._accumulation = Accumulation(optimizer, job.wrapped.parameters)
        observers = [call.__self__ for call in self._calls["see_local"]]
        reduced = list(self._calls["see_reduced"])
        if self._accumulation is not None:
            reduced.append(self._accumulation.see_reduced)
            self._stop_listening = CLIP.subscribe(after=self._see_clipped)
        plan = TapPlan(
            instruments.sketcher,
            guard,
            instruments.reduced,
            observers[0] if observers else Probe(),
            reduced,
            self._shadow,
            self._begin_unawaited,
        )
        self._tap: GradientTap = job.wrapped.make_tap(plan)
        self._passes = ForwardPasses(self._notice_backward, guard)
        self._schedule = ScheduleCalls(
            self._module, guard, lambda: self._passes.current + 1, self._calls["after_schedule"]
        )
        self._layout = instruments.layout
        self.reduced_copies = self._tap.reduced_copies
        self._last_time = time.perf_counter()

    def give_loss(self, value: Any, weight: Any, **more: Any) -> None:
        """Take the loss of a micro-batch, see :meth:`rankscope.Scope.loss`."""
        if more.get("spare") and not self._evaluated:  # its backward pass is about to begin
            self.begin_backward()
        self.call("give_loss", value, weight, self._passes.current, **more)

    def give_samples(self, samples: Any) -> None:
        """Take the ids of the next forward pass's samples from the user."""
        self.close_step()
        self.call("give_samples", samples, self._passes.current + 1)

    def give_rollout(self, trainer: Any, rollout: Any, mask: Any = None) -> None:
        """Take log-probabilities of a micro-batch, for the step whose backward pass comes next."""
        self.close_step()
        self.call("give_rollout", trainer, rollout, mask)

    def call(self, event: str, *args: Any, **more: Any) -> None:
        """Call the probes that handle an event, see :class:`rankscope.bus.probe.Probe`."""
        for call in self._calls[event]:
            call(*args, **more)

    def _leave_out_later(self, seconds: float) -> None:
        """Count seconds of the present call for the next step."""
        self._later_seconds += seconds

    def ask(self, name: str) -> bool:
        """Pass a user's request to the probe of a kind; return whether there is one."""
        probe = self._probes.get(name)
        if probe is not None:
            probe.ask()
        return probe is not None

    def on_request(self, name: str, step: int, content: bytes) -> None:
        """Pass a request of the root to the probe of a kind."""
        if name in self._probes:
            self._probes[name].on_request(step, content)

    def listen(self, recompute: Callable[..., None]) -> list[Callable[[], object]]:
        """Register a function where no optimizer's hook works; return its removers."""
        made = [call(recompute) for call in self._calls["listen"]]
        return [stop for stop in made if stop is not None]

    def trains(self, model: torch.nn.Module) -> bool:
        """Return whether a forward pass counts: in training mode, or in a training without it."""
        return is_training(model) or (self._evaluating and torch.is_grad_enabled())

    def begin_forward(self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin a micro-batch with a forward pass of the outer model."""
        self.begin_micro_batch(args, kwargs, training=not self._evaluating or is_training(model))
        if not any(probe.run_near for probe in self._runners):
            return
        bare = model is self._module or not takes_hooks(self._module)
        if bare or is_compiled(model) or is_compiled(self._module):  # no hook of ours runs inside
            self._let_run_model(early=True)

    def end_forward(
        self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Take the output of a forward pass of the outer model."""
        if self.trains(model):
            self.see_output(output, kwargs)
        elif torch.is_grad_enabled():
            self._see_evaluation(args, kwargs, output)

    def begin_micro_batch(
        self,
        args: Any,
        kwargs: Mapping[str, Any],
        *,
        bypassed: bool = False,
        training: bool = True,
    ) -> None:
        """Begin a micro-batch; a ``bypassed`` one calls the module inside the wrapper."""
        if training:
            self._end_evaluation()
        self.close_step()
        if not bypassed:
            self.call("before_pass", self.step, args, kwargs)
        self.by_backward = False
        with one_walk():
            self._begin_pass(bypassed=bypassed)
            self._passes.begin()
            self.call("on_inputs", args, kwargs, self._passes.current)
            self.call("before_forward", self.step, first=not self._passes.current)

    @property
    def repeating(self) -> bool:
        """Whether the present forward pass is the monitor's, a trace, or a recomputation."""
        return self._runs_model or traced() or self._passes.recomputed

    @property
    def run_due(self) -> bool:
        """Whether a probe must run the model as the forward pass enters the wrapped module."""
        return any(probe.run_due for probe in self._runners)

    def let_run_model(self, model: torch.nn.Module) -> None:
        """Let probes run the outer model."""
        if self.trains(model):
            self._let_run_model(early=False)

    def _let_run_model(self, *, early: bool) -> None:
        self._runs_model = True
        try:
            self.call("run_model", self.step, early=early)
        finally:
            self._runs_model = False

    def _see_evaluation(self, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Watch for a backward pass after a forward pass in evaluation mode."""
        inputs = {id(t) for t in tensors_in([args, kwargs])}  # a hook on an input would stay
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None and id(t) not in inputs]
        if not outputs:
            return
        kept = [each for call in self._calls["on_evaluation"] if (each := call(output, kwargs))]
        train = partial(self._train_on_evaluation, args, kwargs, kept)
        self._tap.see_evaluation(train)

        @untraced
        def reached(gradient: torch.Tensor) -> None:
            self._guard(self._tap.notice_unannounced, train)

        for tensor in outputs:
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        self._evaluated = bool(outputs)

    def _train_on_evaluation(
        self, args: Any, kwargs: Mapping[str, Any], kept: Sequence[Evaluated]
    ) -> None:
        """Begin a micro-batch in its backward pass; passes in evaluation mode count from now on."""
        for each in kept:
            each.before_close()
        self.close_step()
        self._evaluating = True
        self._begin_pass()
        self._passes.begin(reached=True)
        self.call("on_inputs", args, kwargs, self._passes.current)
        for each in kept:
            each.begin(self._passes.current)

    def _end_evaluation(self) -> None:
        """Drop passes in evaluation mode that no update followed, as of an adversarial attack."""
        passed = self._evaluating and self._tap.complete and not self._so_far.updated
        if passed and self._accumulation is not None:
            self._forget()
        self._evaluating = False

    def _begin_pass(self, *, bypassed: bool = False) -> None:
        self._evaluated = False
        self.call("begin_step", self.step, paused=self.paused)
        due = self.step % self.intervals.interval_at(self.step) == 0
        measure = due and not self.paused
        self._tap.begin_forward(measure=measure, bypassed=bypassed)

    def see_output(self, output: Any, kwargs: Mapping[str, Any]) -> None:
        """Handle the output of a forward pass in training."""
        self.call("after_forward")
        self._passes.end(output)
        self.call("on_output", output, kwargs, self._passes.current)

    def _notice_backward(self, trained: Callable[[], None]) -> None:
        """Handle, inside a backward pass, its arrival at the model's output."""
        adds = self._find_old()
        thrown_away = self._accumulation is not None and self._accumulation.thrown_away
        if thrown_away:
            self._tap.drop_gradient()
        self._tap.notice_backward(partial(self._see_trained, trained, adds))
        if thrown_away or self._tap.begins_anew:
            self._passes.set_aside()

    def _see_trained(self, trained: Callable[[], None], adds_to_applied: bool) -> None:
        """Handle a backward pass that accumulates gradients; the step's first one counts.

        Or the first after gradients of the step were thrown away, as those that a generator's loss
        leaves in the discriminator.
        """
        thrown_away = self._accumulation is not None and self._accumulation.thrown_away
        if self._so_far.left_over is None or thrown_away:
            self._so_far.left_over = adds_to_applied
        trained()

    def _find_old(self) -> bool:
        """Return whether a backward pass that begins now adds to gradients that were applied."""
        if self._accumulation is None:
            return False
        adds = self._accumulation.adds_to_applied(self._passes.current)
        if self._so_far.left_over is None:
            self._tap.leave_out(self._accumulation.old())
        return adds

    def _begin_unawaited(self, noticed: bool) -> None:
        """Handle a backward pass that trains, and for which no forward pass may wait.

        It is ``noticed`` if it has reached an output of the model before.
        """
        self.begin_backward()
        adds = self._find_old()
        if noticed:
            return
        self._passes.train()
        if self._so_far.left_over is None:
            self._so_far.left_over = adds
        if self._passes.running and self._is_new("trains inside"):
            self.call("forbid", "the model's forward pass itself runs backward passes")

    def begin_backward(self) -> None:
        """Begin a micro-batch for a backward pass, unless a forward pass waits for one.

        The training calls a method of the model in place of its forward pass, or has several
        backward passes inside or after one, for an update each. Several passes without an update
        in between belong together.
        """
        if self._tap.awaits_backward:
            if self._passes.current in self._passes.graphless:
                self._begin_unseen(-1)
            return
        give_later: list[Callable[[int], None]] = []
        if self._so_far.over:
            give_later = [take(self._passes.current + 1) for take in self._calls["take_later"]]
            self.close_step()
        elif self._passes.current >= 0 and not self.by_backward:
            return
        self.by_backward = True
        self._begin_pass()
        self._passes.begin(reached=True)
        for give in give_later:
            give(self._passes.current)
        self._begin_unseen(self._passes.current)

    def _begin_unseen(self, forward: int) -> None:
        self.unseen = True
        self.call("begin_unseen", forward)

    @property
    def wants_all_parts(self) -> bool:
        """Whether calls of parts matter whose inputs other parts have computed."""
        return any(wants(self._step_of_parts) for wants in self._calls["wants_all_parts"])

    @property
    def _step_of_parts(self) -> int:
        """The step of the next backward pass."""
        return self.step + self._so_far.over

    def begin_part(self, call: PartCall, args: Any, kwargs: Any) -> None:
        """Handle the inputs of a part that the training calls by itself."""
        self.call("before_part", call, args, kwargs, self._step_of_parts)

    def _see_clipped(self, parameters: Any, *_: Any, **__: Any) -> None:
        """Handle the end of a call of torch's that clips gradients."""
        if self._accumulation is not None and not self._so_far.over:
            self._guard(self._accumulation.see_clipped, parameters)

    def begin_optimizer_step(self, optimizer: Any) -> None:
        """Handle the beginning of ``optimizer.step``."""
        self._so_far.move(Event.OPTIMIZER_BEGINS)
        self._tap.see_optimizer(optimizer)
        self._so_far.unreduced |= self._tap.unreduced
        self._updates_alone += self._tap.unreduced
        self.call("before_update", optimizer)

    @property
    def recompute_due(self) -> bool:
        """Whether a probe must recompute the present step before the optimizer runs."""
        return any(probe.recompute_due for probe in self._recomputes)

    def recompute(self) -> None:
        """Let probes run the model again, after all of the step's passes."""
        self._guard.open = False  # so that our hooks ignore these passes
        self._runs_model = True
        try:
            for probe in self._recomputes:
                if probe.recompute_due:
                    probe.recompute()
        finally:
            self._runs_model = False
            self._guard.open = True

    def count_optimizer_step(self, optimizer: Any) -> None:
        """Handle the end of ``optimizer.step``."""
        self._so_far.move(Event.OPTIMIZER_ENDS)
        if self._accumulation is not None:
            self._accumulation.see_updated(self._passes.current + 1, optimizer)
        self.call("after_update", optimizer, complete=self._tap.complete)

    def close_step(self, *, interrupted: bool = False, last: bool = False) -> None:
        """Close a step whose synchronising backward pass has ended.

        A step stays open if the next pass will add to its gradients. A second call of the optimizer
        without such a pass also closes a step. A single call between two passes belongs to the
        second, unless the plan has local steps, or two such calls have shown that the training
        takes some.

        Ctrl-C may be raised in the monitor's own work. The data of that step is then incomplete
        and not sent; if the training goes on all the same, other workers still count the step.

        After an exception (``interrupted``), this worker's state can only be compared after its
        optimizer step.
        """
        if self._tap.complete and not last and self._waits_for_more():
            return
        cut_short = self._guard.take_cut_short()
        phase = self._so_far.phase
        if self._tap.complete or phase is Phase.LEAVING:
            self._updates_alone = 0
            if cut_short:
                self._forget()
            if not (cut_short and interrupted):
                comparable = not cut_short and (self._so_far.updated or not interrupted)
                self._hand_over(comparable=comparable)
        elif self._tap.aborted:  # the training has caught an exception of its backward pass
            self._forget()
        elif phase is Phase.APPLIED:  # not in the last backward pass
            self._hand_over()
        elif phase is Phase.UPDATED and (self._local or self._updates_alone > 1):
            self._local = True
            self._hand_over()
        elif self._passes.current + 1 >= _MOST_PASSES:
            self._forget()
            if self._is_new("forgotten"):
                _log.warning(
                    "nothing is recorded of %d forward passes: none of their backward passes has "
                    "synchronised gradients, and no optimizer that watch() knows was called",
                    _MOST_PASSES,
                )

    def _waits_for_more(self) -> bool:
        """Return whether the step goes on after its gradients were reduced."""
        self._so_far.move(Event.REDUCTION)
        if self._accumulation is None or self._so_far.over:
            return False
        passes = self._passes.current + 1
        return self._accumulation.goes_on(passes, in_calls=self._schedule.found)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        self._tap.remove()
        self._stop_listening()
        self._schedule.stop()
        self.call("close")

    def _forget(self) -> None:
        """Restart the step."""
        self._tap.collect()
        self._schedule.collect()
        self.call("abort")
        self._passes.take_idle()
        self._so_far.move(Event.FORGET)
        self._so_far.left_over = None

    def _is_new(self, note: str) -> bool:
        """Return whether this is noted for the first time in the session."""
        known = note in self._noted
        self._noted.add(note)
        return not known

    def _shadow(self) -> None:
        """Send a step without data, in ``join()`` after this rank's last batch.

        This rank applies no gradient until ``join()`` ends, so there is nothing to compare.
        """
        self._guard(self.close_step)
        self._guard(partial(self._hand_over, comparable=False))

    def _hand_over(self, *, comparable: bool = True) -> None:
        """Send the step; ``comparable``: healthy workers have equal state after it."""
        updated = self._so_far.updated
        self._so_far.move(Event.HAND_OVER)
        now = time.perf_counter()
        if self._evaluating and self._is_new("evaluating"):
            _log.warning(
                "rank %d trains in evaluation mode since step %d: any dropout is off, and any "
                "batch statistics are fixed; call model.train(), unless it is intended",
                dist.get_rank(),
                self.step,
            )
        busy = self._tap.busy_seconds
        gradient = self._collect_gradient()
        end = self._end_of_step(gradient, now, busy, updated=updated, comparable=comparable)
        parts = [part for call in self._calls["collect"] if (part := call(end)) is not None]
        local = LocalStep(self.step, parts, gradient)
        self._guard.leave_out(self._later_seconds)  # counted for the next step
        self._later_seconds = 0.0
        self.step += 1
        self._so_far = _StepSoFar()
        self._last_time = now
        begin_copies()
        self._send(local)

    def _end_of_step(
        self,
        gradient: Pending | None,
        now: float,
        busy: float,
        *,
        updated: bool,
        comparable: bool,
    ) -> StepEnd:
        num_passes = self._passes.current + 1
        set_aside = False
        if self._accumulation is not None:
            set_aside = self._accumulation.set_aside
            self._accumulation.end_step(num_passes, updated=updated)
        graphless = self._passes.graphless
        idle = self._passes.take_idle()
        on_host = self._guard.take_seconds()
        observed = gradient is not None
        return StepEnd(
            step=self.step,
            comparable=comparable,
            idle=idle,
            graphless=graphless,
            num_passes=num_passes - len(idle),
            summed_workers=self._tap.summed_workers,
            unreduced=self._so_far.unreduced,
            left_over=bool(self._so_far.left_over),
            set_aside=set_aside,
            schedule_scale=self._schedule.collect(),
            step_seconds=now - self._last_time,
            busy_seconds=busy,
            overhead_seconds=on_host,
            read_seconds=self._take_read_seconds(),
            device_overhead=self._guard.take_device_overhead(self.step, on_host, observed=observed),
            leave_out=self._leave_out_later,
        )

    def _collect_gradient(self) -> Pending | None:
        measured = self._tap.collect()
        if measured is None:
            return None
        return begin_transfer(
            measured,
            sketch_width=self._layout.sketch_width,
            group_width=self._layout.group_width,
            section_counts=self._layout.section_counts,
            audit_width=self._layout.audit_width,
        )
