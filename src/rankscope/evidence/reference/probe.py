"""Reference steps inside a training: a step's gradient is computed again, in the training thread.

This happens between the step's last backward pass and the optimizer's call, while parameters are
still those of the forward passes. Each worker works by itself. If parameters are sharded, the
workers first gather whole ones, in the training's own process group, after all of them have agreed
in its store. The root judges the numbers, see :mod:`rankscope.evidence.reference.director`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from rankscope.bus.probe import Job, Probe, StepEnd
from rankscope.bus.step import MAX_PAIRED_WORKERS
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import is_out_of_memory
from rankscope.evidence.reference.derivative import DirectionalDerivative
from rankscope.evidence.reference.loss_slopes import measure_loss, why_not_moved
from rankscope.evidence.reference.models import GatheredModel, reference_model, why_no_reference
from rankscope.evidence.reference.recording import StepRecording, in_words
from rankscope.evidence.reference.reference import ReferenceStep
from rankscope.evidence.reference.share import ReferenceShare
from rankscope.wrappers.clipping import CLIP, VALUE
from rankscope.wrappers.deepspeed import before_engine_step
from rankscope.wrappers.optimizers import all_of
from rankscope.wrappers.part_calls import PartCall
from rankscope.wrappers.rendezvous import agree, place_of_all
from rankscope.wrappers.surroundings import outside
from rankscope.wrappers.wrapped import Wrapped

AGREE_SECONDS = 30.0
"""The longest wait of a rank for the others to agree on gathering whole parameters."""

_NO_OPTIMIZER = "watch() was not given the optimizer, before whose call it is computed"
_NO_MESH = "the other ranks of its mesh did not come to watch() in time"
_NO_EXCHANGE = "a rank's loss exchanges no tensors with others"
_NO_CALL = "the optimizer was not called in this step, or with a closure"

_Result = TypeVar("_Result")


class ReferenceProbe(Probe):
    """Reference steps of one watched model on one worker; all calls come on the training thread."""

    def __init__(self, job: Job) -> None:
        wrapped: Wrapped = job.wrapped
        channel = job.channel
        self._channel = channel
        self._leave_out = job.leave_out
        self._at = frozenset(job.verify_at)
        self._requested = False
        self._done = False
        self._step = -1
        self._recording: StepRecording | None = None  # of the present step, if it is computed again
        # of several optimizers, what those get that come after the first one of the step
        self._left: frozenset[str] = frozenset()  # names of parameters
        self._waiting: ReferenceShare | None = None  # computed, and not complete
        self._optimizer = job.optimizer
        self._parameters = wrapped.parameters
        self._module = wrapped.module
        self._device = wrapped.device
        self._group = wrapped.group
        mesh_meeting = None if channel.mesh is None else channel.mesh.ranks
        # All ranks that hold a part of a parameter take part in gathering it.
        self._meeting = (mesh_meeting or channel.meeting) if wrapped.sharded else None
        self._engine = wrapped.wrapper if wrapped.kind.engine else None
        self._why_not = why_no_reference(wrapped)
        if job.optimizer is None:
            self._why_not = self._why_not or _NO_OPTIMIZER
        self._why_no_copy = ""
        if wrapped.group.size() > MAX_PAIRED_WORKERS:
            self._why_no_copy = f"it takes at most {MAX_PAIRED_WORKERS} workers"
        if wrapped.mesh is not None and mesh_meeting is None:
            self._why_no_copy = _NO_MESH
        self._reference: ReferenceStep | None = None
        self._derivative: DirectionalDerivative | None = None
        self._clipped = False  # a loop that reduces has called torch to clip, in this step
        self._listened: list[Callable[[], object]] = []
        if not self._why_not:
            self._prepare(wrapped, job.seed)

    def _prepare(self, wrapped: Wrapped, seed: int) -> None:
        if wrapped.kind.runs_apart and not wrapped.in_shares:
            copy = GatheredModel(wrapped.wrapper) if wrapped.sharded else None
            held = wrapped.parameters if wrapped.held is None else wrapped.held
            trained = {n: p for n, p in wrapped.parameters.items() if p.requires_grad and n in held}
            self._derivative = DirectionalDerivative(
                wrapped.module,
                trained if copy is None else copy.parameters,
                wrapped.device,
                wrapped.group.rank(),
                wrapped.group.size(),
                copy,
            )
        if self._why_no_copy:
            return
        try:
            model = reference_model(wrapped)
        except CanaryDeclined as reason:
            self._why_no_copy = in_words(reason)
        else:
            if wrapped.kind.by_loop:
                self._listened = [
                    relay.subscribe(before=self._before_clipping)
                    for relay in (CLIP, VALUE)
                    if relay.exists
                ]
            self._reference = ReferenceStep(model, wrapped.device, wrapped.group.size(), seed)

    def ask(self) -> None:
        """Compute the gradient of the next step again; all workers request the same step."""
        self._requested = True

    def forbid(self, why: str) -> None:
        """Compute no gradient again, from now on."""
        self._why_not = why
        if self._recording is not None:
            self._recording.declined = why
            self._recording.stop()

    def listen(self, before_step: Callable[..., None]) -> Callable[[], object] | None:
        """Hook ``before_step`` to DeepSpeed's engine, if any; return the hook's removal.

        Its optimizers unscale, clip and move gradients before any hook of an optimizer.
        """
        if self._engine is None or self._why_not:
            return None
        return before_engine_step(self._engine, before_step)

    @property
    def recompute_due(self) -> bool:
        """Whether the present step's gradient will be computed again."""
        return self._recording is not None and self._waiting is None

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note the beginning of a forward pass of the training."""
        self._record(step)
        if self._recording is not None:
            self._recording.begin_pass()

    def wants_all_parts(self, step: int) -> bool:
        """Whether the step is computed again."""
        return self._recording is not None or self._requested or step in self._at

    def before_part(self, call: PartCall, args: Any, kwargs: Any, step: int) -> None:
        """Save the inputs of a part that is called by itself."""
        self._record(step)
        if self._recording is not None:
            self._recording.begin_part(call, args, kwargs)

    def after_part(self, call: PartCall, output: Any) -> None:
        """Note what it has returned."""
        if self._recording is not None:
            self._recording.see_output(output)

    def _record(self, step: int) -> None:
        """Begin to record a step that is to be computed again."""
        if step != self._step:
            self._step = step
            if self._requested or step in self._at:
                self._requested = False
                self._forget()
                self._recording = StepRecording(
                    self._module,
                    self._device,
                    step,
                    inner=self._reference is not None and self._reference.inner,
                    with_loss=self._derivative is not None,
                    declined=self._why_not or ("" if self._derivative else self._why_no_copy),
                )

    def on_module_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save the inputs of a forward pass that has begun."""
        if self._recording is not None:
            self._recording.see_inputs(args, kwargs)

    def on_module_output(self, output: object) -> None:
        """Note the outputs of that forward pass."""
        if self._recording is not None:
            self._recording.see_output(output)

    def see_reduced(self) -> None:
        """Measure the reduced gradient, in a step that is computed again."""
        recording = self._recording
        if recording is None or recording.declined or self._reference is None:
            return
        cut = recording.clips_value or self._reference.is_scaled
        if not (self._clipped and cut):
            recording.attempt(self._reference.see_reduced, recording.num_trained)

    def _before_clipping(self, *_: Any, **__: Any) -> None:
        """Measure what a loop has reduced before it clips; that it has is seen later."""
        recording = self._recording
        if recording is None or recording.declined or self._reference is None or self._clipped:
            return
        self._clipped = True
        recording.attempt(outside, self._reference.see_reduced, recording.num_trained)

    def after_schedule(self) -> None:
        """Measure it once more: what the schedule divides by belongs to the reduction."""
        self.see_reduced()

    def recompute(self) -> None:
        """Compute the gradient again; the optimizer is about to be called."""
        start = time.perf_counter()
        recording = self._recording
        assert recording is not None
        recording.stop()
        recording.attempt(recording.check_parts)
        part, declined = _attempt(self._compute, recording)
        if dist.get_world_size() > 1 or part is None:
            alone = part is not None
            found, why_not_moved = _attempt(self._derive, recording, alone=alone)
            if found is not None:
                part = found
            elif not alone and recording.complete and self._derivative is not None:
                declined += f"; and the loss was not moved either, since {why_not_moved}"
        part = self._with_loss(recording, part)
        part = part or ReferenceShare(declined=declined)
        if self._left and not part.declined and part.slopes is None:
            self._waiting = part
        else:
            self._finish(recording, part)
        self._leave_out(recording.seconds + time.perf_counter() - start)

    def before_update(self, optimizer: Any) -> None:
        """Measure what the next of several optimizers gets: a scaler may have unscaled it by now.

        Only the first call in a step of each counts.
        """
        if self._recording is None or len(all_of(self._optimizer)) < 2:
            return
        own = _names_held([optimizer], self._parameters)
        others = [one for one in all_of(self._optimizer) if one is not optimizer]
        if self._waiting is None:
            self._left = _names_held(others, self._parameters) - own
            return
        assert self._reference is not None
        measured, _ = _attempt(self._reference.measure_later, self._waiting, own & self._left)
        self._waiting = measured or self._waiting
        self._left -= own

    def _compute(self, recording: StepRecording) -> ReferenceShare:
        """Compute the gradient again, on this worker alone."""
        problem = recording.problem() or self._problem(recording)
        if self._meeting is not None:
            topic = f"reference/{recording.step}"
            spread = recording.num_spread  # gathered, too
            problem = self._meeting.agree(topic, problem, AGREE_SECONDS, same=spread)
        if problem:
            raise CanaryDeclined(problem)
        assert self._reference is not None
        part = self._reference.compute(recording.trained).without(self._channel.shared_weights)
        return replace(part, clips=recording.clips, clips_value=recording.clips_value)

    def _problem(self, recording: StepRecording) -> str:
        """Return why a worker cannot compute the gradient alone; empty if it can."""
        if self._reference is None:
            return self._why_no_copy
        try:
            self._reference.check(recording.num_trained)
        except CanaryDeclined as reason:
            return in_words(reason)
        return ""

    def _derive(self, recording: StepRecording, *, alone: bool) -> ReferenceShare:
        """Measure directional derivatives, together with all ranks of the job.

        Where a rank has computed the gradient ``alone``, none measures.
        """
        problem = "a rank has computed it alone" if alone else ""
        trained = recording.trained
        if not problem and not (recording.complete and trained):
            problem = "a batch of the step was not kept"
        if not problem and self._derivative is None:
            problem = "directional derivatives are measured under DDP, FSDP2 and without a wrapper"
        if not problem and recording.clips_value:
            problem = "gradients are clipped by value"
        if not problem:
            assert self._derivative is not None
            try:
                self._derivative.check(trained)
            except CanaryDeclined as reason:
                problem = str(reason)
        problem = self._agree("derivative", recording, problem)
        if problem:
            raise CanaryDeclined(problem)
        assert self._derivative is not None
        reference = self._reference
        clipped = math.nan if reference is None else reference.changed_since_reduction()
        return ReferenceShare(slopes=self._derivative.measure(trained, clipped))

    def _with_loss(
        self, recording: StepRecording, part: ReferenceShare | None
    ) -> ReferenceShare | None:
        """Add how a loss outside of the model changes, if it exchanges tensors between ranks.

        Every rank of the job answers, so that none waits for one that has no such loss.
        """
        if self._derivative is None or dist.get_world_size() == 1:
            return part
        taped = (m for m in recording.trained if m.tape is not None and m.tape.exchanges)
        micro = next(taped, None)
        problem = _NO_EXCHANGE
        if micro is not None and part is not None:
            problem = why_not_moved(micro, self._device)
        problem = self._agree("loss", recording, problem)
        if micro is None or part is None:
            return part
        if problem:
            return replace(part, loss_unchecked=problem)
        try:
            found = measure_loss(micro, self._device, self._group.rank(), self._group.size())
        except CanaryDeclined as reason:  # on all ranks alike
            return replace(part, loss_unchecked=str(reason))
        return replace(part, loss_slopes=found)

    def _agree(self, topic: str, recording: StepRecording, problem: str) -> str:
        """Return why the ranks of the job must not do something together; empty if they may."""
        num_ranks = dist.get_world_size()
        store = place_of_all(f"rankscope/{topic}/{recording.step}", num_ranks)
        return agree(store, num_ranks, problem, AGREE_SECONDS)

    def collect(self, end: StepEnd) -> None:
        """End a step whose gradient was computed again, or was to be."""
        recording = self._recording
        if recording is not None and recording.step <= end.step:
            declined = ReferenceShare(declined=recording.declined or _NO_CALL)
            self._finish(recording, self._waiting or declined)
        if self._done:
            end.busy_seconds = math.nan
        self._done = False

    def abort(self) -> None:
        """Reset the present step, which an exception has ended; it will begin again."""
        if self._recording is not None:
            self._requested = True  # the same step is computed again when it begins once more
            self._step = -1
            self._forget()

    def close(self) -> None:
        """Leave autograd's engine alone."""
        for stop in self._listened:
            stop()
        if self._recording is not None:
            self._recording.stop()

    def _finish(self, recording: StepRecording, part: ReferenceShare) -> None:
        self._forget()
        self._done = True
        if not self._channel.has_room():
            part = ReferenceShare(declined="the monitor's agent does not keep up")
        self._channel.send("reference", recording.step, part.pack())

    def _forget(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        self._clipped = False
        self._left = frozenset()
        self._waiting = None
        if self._reference is not None:
            self._reference.end()


def _names_held(optimizers: Iterable[Any], parameters: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that some optimizers hold."""
    groups = [group for each in optimizers for group in each.param_groups]
    held = {id(p) for group in groups for p in group["params"]}
    return frozenset(name for name, p in parameters.items() if id(p) in held)


def _attempt(work: Callable[..., _Result], *args: Any, **more: Any) -> tuple[_Result | None, str]:
    """Return a function's result; or None and why, if it declines or finds no memory."""
    try:
        return work(*args, **more), ""
    except CanaryDeclined as reason:
        return None, in_words(reason)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, "it has found no memory"


make_probe = ReferenceProbe
