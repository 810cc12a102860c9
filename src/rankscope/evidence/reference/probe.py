"""Reference steps inside a training: a step's gradient is computed again, in the training thread.

This happens between the step's last backward pass and the optimizer's call, while parameters are
still those of the forward passes. Each worker works by itself. If parameters are sharded, the
workers first gather whole ones, in the training's own process group, after all of them have agreed
in its store. The root judges the numbers, see :mod:`rankscope.evidence.reference.director`.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rankscope.bus.probe import Job, Probe, StepEnd
from rankscope.bus.step import MAX_PAIRED_WORKERS
from rankscope.evidence.canary.alone import watch_roots
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import check_room, is_out_of_memory
from rankscope.evidence.canary.replay import in_short
from rankscope.evidence.reference.derivative import DirectionalDerivative
from rankscope.evidence.reference.direct import DirectGradients
from rankscope.evidence.reference.loss_slopes import measure_loss
from rankscope.evidence.reference.loss_tape import LossTape, may_record
from rankscope.evidence.reference.micro_batch import LOST, MicroBatch
from rankscope.evidence.reference.models import (
    EngineModel,
    GatheredModel,
    ReferenceModel,
    ReplicatedModel,
    ShardedModel,
    WholeModel,
)
from rankscope.evidence.reference.reference import ReferenceStep
from rankscope.evidence.reference.share import ReferenceShare
from rankscope.private import Patch, lacking
from rankscope.wrappers.clipping import CLIP, VALUE
from rankscope.wrappers.deepspeed import before_engine_step
from rankscope.wrappers.find import DDP, DEEPSPEED, FSDP2, LOOP, REPLICATE, Wrapped, is_compiled
from rankscope.wrappers.passes import in_backward
from rankscope.wrappers.rendezvous import agree, default_store
from rankscope.wrappers.surroundings import outside

AGREE_SECONDS = 30.0
"""The longest wait of a rank for the others to agree on gathering whole parameters."""

_sessions = itertools.count()  # of this process: each has a place of its own in the store

_NO_OPTIMIZER = "watch() was not given the optimizer, before whose call it is computed"
_NO_MESH = "the other ranks of its mesh did not come to watch() in time"
_NO_EXCHANGE = "a rank's loss exchanges no tensors with others"
_INNER = "the loss takes values of the forward pass that the model does not return"
_BY_ITSELF = (
    "a backward pass of its own reaches parameters, as for a penalty on weights, and which "
    "micro-batch it belongs to is not known"
)
_NO_CALL = "the optimizer was not called in this step, or with a closure"


class ReferenceProbe(Probe):
    """Reference steps of one watched model on one worker; all calls come on the training thread."""

    def __init__(self, job: Job) -> None:
        wrapped: Wrapped = job.wrapped
        channel = job.channel
        self._channel = channel
        self._leave_out = job.leave_out
        self._at = frozenset(job.verify_at)
        mesh_meeting = None if channel.mesh is None else channel.mesh.ranks
        knows_optimizer = job.optimizer is not None
        self._requested = False
        self._step = -1
        self._due = -1
        self._why_not = _why_not(wrapped) or ("" if knows_optimizer else _NO_OPTIMIZER)
        self._why_no_copy = ""
        if wrapped.group.size() > MAX_PAIRED_WORKERS:
            self._why_no_copy = f"it takes at most {MAX_PAIRED_WORKERS} workers"
        if wrapped.mesh is not None and mesh_meeting is None:
            self._why_no_copy = _NO_MESH
        self._module = wrapped.module
        self._device = wrapped.device
        self._group = wrapped.group
        engine = wrapped.kind is DEEPSPEED
        shards = wrapped.kind is FSDP2 or (engine and wrapped.replica is None)
        # All ranks that hold a part of a parameter take part in gathering it.
        self._meeting = (mesh_meeting or channel.meeting) if shards else None
        self._engine = wrapped.wrapper if engine else None
        self._reference: ReferenceStep | None = None
        self._derivative: DirectionalDerivative | None = None
        if not self._why_not:
            self._prepare(wrapped, job.seed)
        self._session = next(_sessions)
        self._roots: Patch | None = None
        self._root: Tensor | None = None
        self._direct: DirectGradients | None = None  # of a backward pass that runs
        self._num_passes = 0
        self._passes: list[MicroBatch] = []
        self._declined = ""
        self._num_clips = self._num_value_clips = 0  # before the step
        self._spent = 0.0
        self.entering = self._done = False
        self._inside: MicroBatch | None = None
        self._tape: LossTape | None = None  # that is being recorded

    def _prepare(self, wrapped: Wrapped, seed: int) -> None:
        copy = GatheredModel(wrapped.wrapper) if wrapped.kind is FSDP2 else None
        if wrapped.kind in (DDP, LOOP, FSDP2) and not wrapped.in_shares:
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
            model = _model(wrapped)
        except CanaryDeclined as reason:
            self._why_no_copy = _in_words(reason)
        else:
            self._reference = ReferenceStep(model, wrapped.device, wrapped.group.size(), seed)

    def ask(self) -> None:
        """Compute the gradient of the next step again; all workers request the same step."""
        self._requested = True

    def forbid(self, why: str) -> None:
        """Compute no gradient again, from now on."""
        self._why_not = self._declined = why
        self._unwatch_roots()

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
        return self._due >= 0

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note the beginning of a forward pass of the training."""
        self._stop_tape()
        if step != self._step:
            self._step = step
            if self._requested or step in self._at:
                self._requested = False
                self._forget()
                self._due = step
                self._declined = self._why_not
                self._num_clips = CLIP.num_calls
                self._num_value_clips = VALUE.num_calls
                if self._derivative is None:
                    self._declined = self._why_not or self._why_no_copy
                if not self._declined:
                    self._roots = watch_roots(self._before_backward, self._after_backward)
        if self.recompute_due:
            self._num_passes += 1
            self.entering = True

    def on_module_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save the inputs of a forward pass that has begun."""
        if not self.entering:
            return
        self.entering = False
        if not self._declined:
            self._try(self._keep, args, kwargs)

    def on_module_output(self, output: object) -> None:
        """Note the outputs of that forward pass."""
        inside = self._inside
        self._inside = None
        if inside is not None:
            self._try(self._see_output, inside, output)

    def _see_output(self, micro: MicroBatch, output: object) -> None:
        """Note the outputs of a forward pass, and record what is computed from them."""
        self._stop_tape()  # of another micro-batch, as in a pipeline
        outputs = micro.see_output(output)
        if outputs and self._derivative is not None and dist.get_world_size() > 1 and may_record():
            micro.tape = self._tape = LossTape(outputs)
            self._tape.start()

    def see_reduced(self) -> None:
        """Measure the reduced gradient, in a step that is computed again."""
        if self.recompute_due and not self._declined and self._reference is not None:
            self._try(self._reference.see_reduced, self._num_trained)

    def after_schedule(self) -> None:
        """Measure it once more: what the schedule divides by belongs to the reduction."""
        self.see_reduced()

    def recompute(self) -> None:
        """Compute the gradient again; the optimizer is about to be called."""
        start = time.perf_counter()
        step = self._due
        self._unwatch_roots()
        kept = not self._declined and len(self._passes) == self._num_passes
        part = self._attempt(self._compute, step)
        if dist.get_world_size() > 1 or part is None:
            why_no_copy = self._declined
            found = self._attempt(self._derive, step, kept=kept, alone=part is not None)
            if found is not None:
                part = found
            elif part is None and kept and self._derivative is not None:
                why_no_copy += f"; and the loss was not moved either, since {self._declined}"
            self._declined = why_no_copy
        part = self._with_loss(step, part)
        self._finish(step, part or ReferenceShare(declined=self._declined))
        spent = self._spent
        self._spent = 0.0
        self._leave_out(spent + time.perf_counter() - start)

    def _attempt(self, work: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Return a function's result; None if it declines, or finds no memory."""
        try:
            return work(*args, **more)
        except CanaryDeclined as reason:
            self._declined = _in_words(reason)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._declined = "it has found no memory"
        return None

    def _compute(self, step: int) -> ReferenceShare:
        """Compute the gradient again, on this worker alone."""
        self._check(step)
        assert self._reference is not None
        trained = [micro for micro in self._passes if micro.trained]
        part = self._reference.compute(trained).without(self._channel.shared_weights)
        return replace(
            part,
            clips=CLIP.num_calls > self._num_clips,
            clips_value=self._clips_value,
        )

    @property
    def _clips_value(self) -> bool:
        """Whether torch has clipped elements of gradients in the step."""
        return VALUE.num_calls > self._num_value_clips

    def _derive(self, step: int, *, kept: bool, alone: bool) -> ReferenceShare:
        """Measure directional derivatives, together with all ranks of the job.

        Where a rank has computed the gradient alone, none measures.
        """
        problem = "a rank has computed it alone" if alone else ""
        trained = [micro for micro in self._passes if micro.trained]
        if not problem and not (kept and trained):
            problem = "a batch of the step was not kept"
        if not problem and self._derivative is None:
            problem = "directional derivatives are measured under DDP, FSDP2 and without a wrapper"
        if not problem and self._clips_value:
            problem = "gradients are clipped by value"
        if not problem:
            assert self._derivative is not None
            try:
                self._derivative.check(trained)
            except CanaryDeclined as reason:
                problem = str(reason)
        c10d: Any = dist.distributed_c10d
        place = f"rankscope/derivative/{self._session}/{step}"
        store = c10d.PrefixStore(place, default_store())
        problem = agree(store, dist.get_world_size(), problem, AGREE_SECONDS)
        if problem:
            raise CanaryDeclined(problem)
        assert self._derivative is not None
        reference = self._reference
        clipped = math.nan if reference is None else reference.changed_since_reduction()
        return ReferenceShare(slopes=self._derivative.measure(trained, clipped))

    def _with_loss(self, step: int, part: ReferenceShare | None) -> ReferenceShare | None:
        """Add how a loss outside of the model changes, if it exchanges tensors between ranks.

        Every rank of the job answers, so that none waits for one that has no such loss.
        """
        if self._derivative is None or dist.get_world_size() == 1:
            return part
        trained = [micro for micro in self._passes if micro.trained]
        micro = next((m for m in trained if m.tape is not None and m.tape.exchanges), None)
        problem = _NO_EXCHANGE
        if micro is not None and micro.tape is not None and part is not None:
            problem = self._why_not_moved(micro.tape, micro.root)
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(f"rankscope/loss/{self._session}/{step}", default_store())
        problem = agree(store, dist.get_world_size(), problem, AGREE_SECONDS)
        if micro is None or micro.tape is None or part is None:
            return part
        if problem:
            return replace(part, loss_unchecked=problem)
        rank, size = self._group.rank(), self._group.size()
        try:
            found = measure_loss(
                micro.tape, micro.arrived, self._device, rank, size, micro.rounds_in
            )
        except CanaryDeclined as reason:  # on all ranks alike
            return replace(part, loss_unchecked=str(reason))
        return replace(part, loss_slopes=found)

    def _why_not_moved(self, tape: LossTape, root: Tensor | float | None) -> str:
        """Return why a loss cannot be run again; empty if it can."""
        try:
            check_room(4 * sum(o.nbytes for o in tape.outputs), self._device, "moved outputs")
            tape.check(math.nan if root is None else float(root))
        except CanaryDeclined as reason:
            return str(reason)
        return ""

    def _before_backward(self, tensors: Any, gradients: Any) -> None:
        """Keep the value on which a backward pass is called, and watch what passes the outputs."""
        tape = self._stop_tape()
        if tape is not None and len(tensors) == 1:
            tape.end(tensors[0], gradients[0])
        self._root = None
        self._try(outside, self._keep_root, tensors, gradients)
        if not (self._declined or in_backward()):  # a checkpoint's own begins inside
            self._try(outside, self._watch_direct, tensors)

    def _watch_direct(self, tensors: Sequence[Tensor]) -> None:
        self._unwatch_direct()  # the last one was interrupted
        if not self._passes:
            return
        outputs = {edge for micro in self._passes for edge in micro.edges}
        self._direct = DirectGradients(tensors, outputs, set(map(id, self._module.parameters())))

    def _keep_root(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if len(tensors) != 1 or tensors[0].numel() != 1:
            return
        tensor = tensors[0]
        gradient = gradients[0]
        root = tensor.detach() if gradient is None else tensor.detach() * gradient.detach()
        self._root = root.clone()

    def _after_backward(self) -> None:
        """Give it to the micro-batch that it trained, if it was one."""
        new = [micro for micro in self._passes if micro.trained and micro.root is None]
        for micro in new:
            micro.root = self._root if len(new) == 1 and self._root is not None else math.nan
        if not (self._declined or in_backward()):
            self._try(outside, self._keep_direct, new)

    def _keep_direct(self, trained: Sequence[MicroBatch]) -> None:
        """Give the gradients past the outputs to the micro-batch that was ``trained``."""
        direct = self._unwatch_direct()
        if direct is None:
            return
        if direct.lost:
            raise CanaryDeclined(LOST.format(direct.lost))
        if direct.takes_inner:
            raise CanaryDeclined(_INNER)
        if direct.by_parameter:
            if len(trained) != 1:
                raise CanaryDeclined(_BY_ITSELF)
            trained[0].direct = direct.by_parameter

    def _unwatch_direct(self) -> DirectGradients | None:
        direct = self._direct
        self._direct = None
        if direct is not None:
            direct.remove()
        return direct

    def _stop_tape(self) -> LossTape | None:
        """Record no more; return what was recorded."""
        tape = self._tape
        self._tape = None
        if tape is not None:
            tape.stop()
        return tape

    def _unwatch_roots(self) -> None:
        self._stop_tape()
        self._unwatch_direct()
        if self._roots is not None:
            self._roots.remove()
            self._roots = None

    def collect(self, end: StepEnd) -> None:
        """End a step whose gradient was computed again, or was to be."""
        if self.recompute_due:
            self._finish(self._due, ReferenceShare(declined=self._declined or _NO_CALL))
        if self._done:
            end.busy_seconds = math.nan
        self._done = False

    def abort(self) -> None:
        """Reset the present step, which an exception has ended; it will begin again."""
        if self.recompute_due:
            self._requested = True  # the same step is computed again when it begins once more
            self._step = -1
            self._forget()

    @property
    def _num_trained(self) -> int:
        return sum(micro.trained for micro in self._passes)

    def _keep(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inner = self._reference is not None and self._reference.inner
        self._inside = MicroBatch(self._module, self._device, args, kwargs, inner=inner)
        self._passes.append(self._inside)

    def _check(self, step: int) -> None:
        """Check that the gradient can be computed again, on all ranks that gather parameters."""
        problem = self._problem()
        if self._meeting is not None:
            spread = sum(micro.num_spread for micro in self._passes)  # gathered, too
            topic = f"reference/{step}"
            problem = self._meeting.agree(topic, problem, AGREE_SECONDS, same=spread)
        if problem:
            raise CanaryDeclined(problem)

    def _problem(self) -> str:
        """Return why the step's gradient cannot be computed again; empty if it can."""
        if self._declined:
            return self._declined
        if len(self._passes) != self._num_passes:
            return "a forward pass of the step went past what was watched"
        if not self._num_trained:
            return "no backward pass has reached what the model has returned"
        if self._reference is None:
            return self._why_no_copy
        try:
            self._reference.check(self._num_trained)
        except CanaryDeclined as reason:
            return _in_words(reason)
        return ""

    def _try(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function; if it fails, the step is not computed again."""
        start = time.perf_counter()
        try:
            work(*args)
        except CanaryDeclined as reason:
            self._declined = _in_words(reason)
            self._passes.clear()
        except Exception as error:
            self._declined = f"something failed ({in_short(error)})"
            self._passes.clear()
        self._spent += time.perf_counter() - start

    def _finish(self, step: int, part: ReferenceShare) -> None:
        self._forget()
        self._done = True
        if not self._channel.has_room():
            part = ReferenceShare(declined="the monitor's agent does not keep up")
        self._channel.send("reference", step, part.pack())

    def close(self) -> None:
        """Leave autograd's engine alone."""
        self._unwatch_roots()

    def _forget(self) -> None:
        self._unwatch_roots()
        self._due = -1
        self._num_passes = 0
        self._declined = ""
        self._passes.clear()
        self.entering = False
        self._inside = None
        if self._reference is not None:
            self._reference.end()


def _model(wrapped: Wrapped) -> ReferenceModel:
    if wrapped.kind is FSDP2:
        return _sharded(wrapped)
    if wrapped.kind is DEEPSPEED:
        return EngineModel(wrapped.wrapper, wrapped.group.size())
    kind = ReplicatedModel if wrapped.kind is REPLICATE else WholeModel
    size = wrapped.group.size()
    return kind(wrapped.module, size, wrapped.held, in_shares=wrapped.in_shares)


def _sharded(wrapped: Wrapped) -> ShardedModel:
    """Return a model under FSDP2."""
    model = ShardedModel(wrapped.wrapper)
    axes = {} if wrapped.mesh is None else wrapped.mesh.axes
    shared = model.tensor_parallel
    if shared is not None and len(shared.ranks) > 1 and axes.get(shared.name) != shared.ranks:
        raise CanaryDeclined(f"which ranks share its parameters along {shared.name} is not known")
    others = [axis for axis in axes if shared is None or axis != shared.name]
    if others:
        raise CanaryDeclined(
            f"along {' and '.join(others)}, an axis of the mesh that shards no parameter, ranks "
            "may have parts of a batch, which no worker could run alone"
        )
    return model


def _why_not(wrapped: Wrapped) -> str:
    """Return why no gradient of a model can be computed again; empty if it can."""
    if any(kind.__name__ == "LightningModule" for kind in type(wrapped.module).__mro__):
        return "Lightning runs training_step in place of the forward pass, with all that it logs"
    if wrapped.kind.no_reference:
        return wrapped.kind.no_reference
    if any(map(is_compiled, wrapped.wrapper.modules())):
        return "the model is compiled, and would run by other operations"
    missing = lacking("canary")
    return f"torch lacks {', '.join(missing)}" if missing else ""


def _in_words(reason: CanaryDeclined) -> str:
    """Return the reason of a decline, with a canary's words for a reference step."""
    return str(reason).replace("a canary", "a reference step").replace("the canary", "it")


def make_probe(job: Job) -> ReferenceProbe:
    """Return the probe of reference steps."""
    return ReferenceProbe(job)
