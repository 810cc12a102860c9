"""What one worker sees of a step, collected from its first forward pass to its last.

A step ends with the backward pass that synchronises gradients, but the optimizer's call and the
time belong to it as well. So a step is closed when the next one's first forward pass begins. Where
each micro-batch's backward pass synchronises, the optimizer's call ends the step.

A training that never leaves ``no_sync`` has no such pass. There, from the second call of the
optimizer on, each call closes a step; from the first one on, where the plan has local steps.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rankscope.capture import (
    GradientTransfer,
    LossMeter,
    OptimizerMeter,
    RolloutMeter,
    SampleMeter,
)
from rankscope.capture.accumulation import Accumulation
from rankscope.capture.guard import Guard
from rankscope.capture.host import begin_copies
from rankscope.capture.inputs import INPUT_METERS
from rankscope.capture.passes import ForwardPasses, tensors_in
from rankscope.capture.state.exact_evidence import NoEvidence
from rankscope.capture.state.trace import PendingTrace
from rankscope.capture.surroundings import traced
from rankscope.capture.taps.tap import BothSee
from rankscope.core.governor import Intervals
from rankscope.reduce.exact import pack_share
from rankscope.session.canary import LiveCanary
from rankscope.session.instruments import Instruments
from rankscope.session.local_step import LocalStep
from rankscope.session.mesh_axes import LiveReplicas
from rankscope.session.verification import LiveVerification
from rankscope.session.wrapping import is_compiled, is_training

_log = logging.getLogger("rankscope")

_MOST_PASSES = 8192
"""Forward passes of one step: what more of them leave would only fill the memory."""


class StepCollector:
    """Collects one worker's steps, one after the other; all calls come on the training thread.

    Args:
        instruments: What measures the model's gradients.
        optimizer: The optimizer, if known.
        guard: Keeps exceptions out of the training, and counts the time.
        send: Takes each step that is closed.
        first_step: Number of the first step.
        canary: Replays batches on all workers; None without.
        verification: Computes gradients of single steps again.
        replicas: Reads what is replicated over other axes of a mesh; None where nothing is.
    """

    def __init__(
        self,
        instruments: Instruments,
        optimizer: torch.optim.Optimizer | None,
        guard: Guard,
        send: Callable[[LocalStep], None],
        first_step: int = 0,
        canary: LiveCanary | None = None,
        verification: LiveVerification | None = None,
        replicas: LiveReplicas | None = None,
    ) -> None:
        self.paused = self._evaluating = self._in_canary = False
        self.step = first_step
        self._new_losses = partial(LossMeter, shifted=instruments.shifted_labels)
        self._knows_optimizer, self._warned = optimizer is not None, False
        self.intervals = Intervals(instruments.every)
        make_exact = instruments.make_exact
        self._exact = None if make_exact is None else make_exact(guard)
        self._guard = guard
        self._send, self._take_read_seconds = send, instruments.take_read_seconds
        self._canary, self._module = canary, instruments.module
        self._verification, self._replicas = verification, replicas
        self._losses = self._new_losses()
        self._samples = SampleMeter()
        self._inputs = tuple(make() for make in INPUT_METERS)
        self._rollouts = RolloutMeter()
        self._optimizer = OptimizerMeter(optimizer)
        self._evidence = instruments.make_evidence_meter(optimizer)
        make_trace = instruments.make_trace_meter
        self._trace = None if make_trace is None else make_trace(optimizer, guard.leave_out)
        self._replica = math.nan if instruments.replica is None else instruments.replica
        self._unreduced = self._updated = self._forgot = self._handing_over = False
        self._reduced = False  # by some backward pass of the step
        self._left_over: bool | None = None  # whether it adds to a gradient that was applied
        self._updates_alone = 0  # since gradients were synchronised for the last time
        self._local = instruments.local_steps > 0  # updates alone are steps of their own
        self._accumulation = None if optimizer is None else Accumulation(optimizer)
        others = (self._trace, self._accumulation, verification)
        told = [other for other in others if other is not None]
        observer = BothSee(self._evidence, *told) if told else self._evidence
        self._tap = instruments.make_tap(guard, observer, self._shadow)
        self._passes = ForwardPasses(self._notice_backward, guard)
        self._layout = instruments.layout
        self._last_time = time.perf_counter()

    @property
    def reduced_copies(self) -> int:
        """How many workers hold each element of the reduced gradient."""
        return self._tap.reduced_copies

    def give_loss(
        self,
        value: Any,
        weight: Any,
        **more: Any,
    ) -> None:
        """Take the loss of a micro-batch, see :meth:`rankscope.capture.LossMeter.give`."""
        self._losses.give(value, weight, self._passes.current, **more)

    def give_samples(self, samples: Any) -> None:
        """Take the identity of the next forward pass's samples from the user."""
        self.close_step()
        self._samples.give(samples, self._passes.current + 1)

    def give_rollout(self, trainer: Any, rollout: Any, mask: Any = None) -> None:
        """Take log-probabilities of a micro-batch, see :meth:`rankscope.capture.RolloutMeter.give`.

        They belong to the step whose backward pass comes next.
        """
        self.close_step()
        self._rollouts.give(trainer, rollout, mask)

    def trains(self, model: torch.nn.Module) -> bool:
        """Return whether a forward pass counts: in training mode, or trained without it."""
        return is_training(model) or (self._evaluating and torch.is_grad_enabled())

    def begin_forward(self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Take the inputs of a forward pass that counts, of the model that the training calls."""
        self.begin_micro_batch(args, kwargs, training=not self._evaluating or is_training(model))
        canary = self._canary
        if canary is None or not canary.near:
            return
        bare = model is self._module
        if bare or is_compiled(model) or is_compiled(self._module):  # no hook of ours runs inside
            self._run_canary(partial(canary.run_early, self.step))

    def end_forward(
        self, model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Take what a forward pass of the model that the training calls has returned."""
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
        """Take the inputs of a forward pass in training.

        Args:
            args: Its inputs by position.
            kwargs: Its inputs by name.
            bypassed: Whether it goes past the wrapper, to the module inside.
            training: Whether it runs in training mode.
        """
        if training:
            self._end_evaluation()
        self.close_step()
        if self._canary is not None and not bypassed:
            self._guard.leave_out(self._canary.before_forward(self.step, args, kwargs))
        self._begin_pass(bypassed=bypassed)
        self._passes.begin()
        self._see_inputs(args, kwargs)
        self._evidence.before_forward(first=not self._passes.current)

    def _see_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._samples.see(args, kwargs, self._passes.current)
        for meter in self._inputs:
            meter.see(args, kwargs, self._passes.current)

    def enter_module(self) -> None:
        """Take notice that a forward pass is about to enter the wrapped module."""
        self._evidence.enter_module()

    def keep_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Take what a forward pass brings into the model, where it is to be run once more."""
        if self._verification is not None and self._verification.entering:
            self._verification.enter_module(args, kwargs)

    def keep_output(self, output: object) -> None:
        """Take what such a forward pass has returned."""
        if self._verification is not None:
            self._verification.leave_module(output)

    @property
    def verifying(self) -> bool:
        """Whether a gradient is computed again just now."""
        return self._verification is not None and self._verification.computing

    @property
    def repeating(self) -> bool:
        """Whether what the model runs just now is none of the training's forward passes.

        It runs for the monitor (a canary, a reference step), in a trace, or is a pass that is
        known already and which a checkpoint recomputes.
        """
        return self._in_canary or self.verifying or traced() or self._passes.recomputed

    @property
    def canary_due(self) -> bool:
        """Whether a canary is to run where the forward pass enters the wrapped module."""
        return self._canary is not None and self._canary.due

    def run_canary(self, model: torch.nn.Module) -> None:
        """Run the canary that is due there.

        Args:
            model: What the training calls.
        """
        if self._canary is not None and self.trains(model):
            self._run_canary(self._canary.run)

    def _run_canary(self, run: Callable[[], float]) -> None:
        self._in_canary = True
        try:
            self._guard.leave_out(run())
        finally:
            self._in_canary = False

    def _see_evaluation(self, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Take a forward pass in evaluation mode, which a backward pass may still follow."""
        inputs = {id(tensor) for tensor in tensors_in([args, kwargs])}  # would keep their own hook
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None and id(t) not in inputs]
        if not outputs:
            return
        losses = self._new_losses()
        losses.see(output, kwargs)
        train = partial(self._train_on_evaluation, args, kwargs, losses, self._losses.num_given)

        def reached(gradient: torch.Tensor) -> None:
            self._guard(self._tap.notice_unannounced, train)

        for tensor in outputs:
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def _train_on_evaluation(
        self, args: Any, kwargs: Mapping[str, Any], losses: LossMeter, num_given: tuple[int, int]
    ) -> None:
        """Begin a micro-batch in its backward pass: its forward pass ran in evaluation mode.

        From now on forward passes in this mode count, until one in training mode is seen.
        """
        self._losses.move(num_given, losses)
        self.close_step()
        self._evaluating = True
        self._begin_pass()
        self._passes.begin(reached=True)
        self._see_inputs(args, kwargs)
        self._losses.absorb(losses, self._passes.current)

    def _end_evaluation(self) -> None:
        """Forget what ran in evaluation mode without a step of the optimizer after it.

        It was no training but, say, an attack on the model, which needs gradients.
        """
        if self._evaluating and self._tap.complete and self._knows_optimizer and not self._updated:
            self._forget()
        self._evaluating = False

    def _begin_pass(self, *, bypassed: bool = False) -> None:
        self._evidence.begin_step(self.step)
        if self._replicas is not None:
            self._replicas.begin_step(self.step)
        if self._verification is not None:
            self._verification.begin_pass(self.step)
        if self._trace is not None:
            self._trace.begin_step(self.step, paused=self.paused)
        due = self.step % self.intervals.interval_at(self.step) == 0
        measure = due and not self.paused
        if self._exact is not None:
            self._exact.measure = measure
        self._tap.begin_forward(measure=measure, bypassed=bypassed)

    def see_output(self, output: Any, kwargs: Mapping[str, Any]) -> None:
        """Take what a forward pass in training returned."""
        self._evidence.after_forward()
        self._passes.end(output)
        self._losses.see(output, kwargs, self._passes.current)

    def _notice_backward(self, trained: Callable[[], None]) -> None:
        """Take notice, from inside it, that a backward pass has reached what the model returned."""
        accumulation = self._accumulation
        adds = accumulation is not None and accumulation.adds_to_applied()
        self._tap.notice_backward(partial(self._see_trained, trained, adds))

    def _see_trained(self, trained: Callable[[], None], adds_to_applied: bool) -> None:
        """Take notice that a backward pass accumulates gradients; the step's first one counts."""
        if self._left_over is None:
            self._left_over = adds_to_applied
        trained()

    def begin_optimizer_step(self) -> None:
        """Take notice that ``optimizer.step`` is about to run."""
        self._updated = False
        self._tap.see_optimizer()
        self._unreduced |= self._tap.unreduced
        self._updates_alone += self._tap.unreduced
        self._evidence.see_applied()
        if self._replicas is not None:
            self._replicas.see_applied()

    def verify(self) -> None:
        """Compute the step's gradient again, if that is due; the optimizer is about to run."""
        if self._verification is None or not self._verification.under_way:
            return
        self._guard.open = False  # to hooks of ours that the model's own passes would reach
        try:
            seconds = self._verification.compute()
        finally:
            self._guard.open = True
        self._guard.leave_out(seconds)

    def count_optimizer_step(self, optimizer: Any) -> None:
        """Take a call of ``optimizer.step`` that has ended."""
        self._optimizer.count(optimizer)
        self._updated = True
        if self._accumulation is not None:
            self._accumulation.see_updated(self._passes.current + 1)
        if self._tap.complete:
            self._evidence.see_updated()

    def close_step(self, *, interrupted: bool = False, last: bool = False) -> None:
        """Close a step, once its synchronising backward pass has ended.

        Unless the next one will add to the gradients that it has left. Or once the optimizer has
        been called for the second time without such a pass. A single call between two of them
        belongs to the second, unless the plan has local steps, or two calls without a pass between
        them have shown that the training takes some.

        Ctrl-C may be raised in the monitor's own work. What is known of a step is not whole then,
        and is not sent; where the training goes on all the same, the others still count the step.

        Args:
            interrupted: Whether an exception ended the training. Then what this worker holds can
                only be held against the others when its optimizer has had its turn.
            last: Whether nothing comes after it.
        """
        if self._tap.complete and not last and self._waits_for_more():
            return
        cut_short = self._guard.take_cut_short()
        if self._tap.complete or self._handing_over:
            self._updates_alone = 0
            if cut_short:
                self._forget()
            if not (cut_short and interrupted):
                comparable = not cut_short and (self._updated or not interrupted)
                self._hand_over(comparable=comparable)
        elif self._tap.aborted:  # the training caught what its backward pass raised
            self._forget()
        elif self._updated and self._reduced:  # not in the last backward pass
            self._hand_over()
        elif self._updated and (self._local or self._updates_alone > 1):
            self._local = True
            self._hand_over()
        elif self._passes.current + 1 >= _MOST_PASSES:
            self._forget()
            if not self._forgot:
                self._forgot = True
                _log.warning(
                    "nothing is recorded of %d forward passes: none of their backward passes has "
                    "synchronised gradients, and no optimizer that watch() knows was called",
                    _MOST_PASSES,
                )

    def _waits_for_more(self) -> bool:
        """Return whether the step goes on, though its gradients have been reduced."""
        self._reduced = True
        if self._accumulation is None or self._updated or self._handing_over:
            return False
        return self._accumulation.goes_on(self._passes.current + 1)

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._tap.remove()
        self._evidence.remove()
        if self._replicas is not None:
            self._replicas.close()
        if self._exact is not None:
            self._exact.release()

    def _forget(self) -> None:
        """Begin the step anew."""
        self._tap.collect()
        if self._verification is not None:
            self._verification.abandon()
        self._evidence.abort()
        for reader in (self._trace, self._replicas):
            if reader is not None:
                reader.abort()
        self._passes.take_idle()
        self._losses.collect()
        self._samples.collect()
        for meter in self._inputs:
            meter.collect()
        self._rollouts.collect()
        self._updated = self._reduced = False
        self._left_over = None

    def _shadow(self) -> None:
        """Take part in a step of the others, in ``join()`` after this rank's last batch.

        It applies none of their gradients until ``join()`` ends, so there is nothing to compare.
        """
        self._guard(self.close_step)
        self._guard(partial(self._hand_over, comparable=False))

    def _hand_over(self, *, comparable: bool = True) -> None:
        """Send what is known of a step.

        Args:
            comparable: Whether workers that agree hold the same after it.
        """
        self._handing_over = True
        now = time.perf_counter()
        if self._evaluating and not self._warned:
            self._warned = True
            _log.warning(
                "rank %d trains in evaluation mode since step %d: without dropout, and with batch "
                "statistics that stand still; call model.train(), unless it is meant",
                dist.get_rank(),
                self.step,
            )
        canary = None if self._canary is None else self._canary.collect()
        verified = self._verification is not None and self._verification.end_step()
        busy = math.nan if verified or canary is not None else self._tap.busy_seconds
        if self._trace is not None:
            busy -= self._trace.busy_seconds
        named = self._samples.named
        num_passes = self._passes.current + 1
        idle = self._passes.take_idle()
        losses, multipliers = self._losses.collect(idle)
        if not comparable:
            self._evidence.abort()
            if self._replicas is not None:
                self._replicas.abort()
        evidence = self._evidence if comparable else NoEvidence()
        if self._replicas is not None:
            self._replicas.end_step(self.step)
        state, compared = evidence.collect(self.step)
        trace, tracing_seconds = self._collect_trace(comparable=comparable)
        gradient, on_host = self._collect_gradient(), self._guard.take_seconds()
        local = LocalStep(
            step=self.step,
            gradient=gradient,
            felt=self._guard.take_felt(self.step, on_host, observed=gradient is not None),
            losses=losses,
            multipliers=multipliers,
            summed_workers=self._tap.summed_workers,
            samples=self._samples.collect(idle),
            inputs=[*[m.collect(idle) for m in self._inputs], *self._rollouts.collect()],
            state=state,
            canary=canary,
            trace=trace,
            values={
                **self._optimizer.collect(),
                **compared,
                "samples_named": named,
                "micro_batches": num_passes - len(idle) or math.nan,
                "replica": self._replica,
                "unreduced": self._unreduced,
                "grad_left_over": bool(self._left_over),
                "step_seconds": now - self._last_time,
                "busy_seconds": busy,
                "overhead_seconds": on_host,
                "read_seconds": self._take_read_seconds(),
            },
        )
        self._guard.leave_out(tracing_seconds)  # they will count with the next step's
        self.step += 1
        self._unreduced = self._updated = self._reduced = False
        self._left_over = None
        self._last_time = now
        self._handing_over = False
        begin_copies()
        self._send(local)

    def _collect_trace(self, *, comparable: bool) -> tuple[PendingTrace | None, float]:
        if self._trace is None:
            return None, 0.0
        if not comparable:
            self._trace.abort()
        return self._trace.collect()

    def _collect_gradient(self) -> GradientTransfer | None:
        measured = self._tap.collect()
        gram = None if self._exact is None else self._exact.take_gram()
        if measured is None or (self._exact is not None and gram is None):
            return None
        return GradientTransfer(
            measured,
            sketch_width=self._layout.sketch_width,
            group_width=self._layout.group_width,
            section_counts=self._layout.section_counts,
            audit_width=self._layout.audit_width,
            gram=None if gram is None else pack_share(gram),
        )
