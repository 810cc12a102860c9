"""Keeps what ``rankscope parity`` compares of the first steps of a training, on one rank.

Everything is measured where it lies: no rank gathers anything, and each writes one file for each
step. The training keeps its bits, but for changes that the comparison asks for before the first
step: :class:`Start`.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.bus.parity import (
    BUFFER,
    FOLDER,
    GRADIENT,
    HELD,
    MOMENT,
    START,
    UNCLIPPED,
    UPDATE,
    RankStep,
    TensorFigures,
    file_of_step,
    folder_of_rank,
)
from rankscope.bus.probe import Job, Probe
from rankscope.evidence.loss.probe import LossMeter, read_losses
from rankscope.evidence.optimizer.probe import held_by
from rankscope.evidence.parity.figures import (
    FigureMeter,
    Labels,
    Named,
    Part,
    elements_among,
    labels_among,
    labels_before,
    part_of,
)
from rankscope.evidence.parity.held import (
    DealtExperts,
    HeldElements,
    MegatronBuffers,
    Naming,
    Rule,
    like_parameter,
    parameters_of,
    scaler_around,
    settings_of,
    size_of,
    state_of,
    stored,
)
from rankscope.evidence.parity.inside import LayerHooks, LayerOutputs
from rankscope.evidence.parity.start import Start, set_up
from rankscope.evidence.randomness.probe import OF_TORCH, RandomMeter
from rankscope.evidence.samples.probe import SampleMeter
from rankscope.files import make_folder, replace
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.clipping import CLIP
from rankscope.wrappers.labels import shifts_labels
from rankscope.wrappers.megatron import is_megatron
from rankscope.wrappers.optimizers import all_of, trained_copies
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.surroundings import outside
from rankscope.wrappers.wrapped import takes_hooks

_log = logging.getLogger("rankscope")

_MOST_DREW = 8
_COARSE = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a recorder stands."""

    folder: Path  # the folder of all ranks' files
    rank: int = 0
    world: int = 1
    # ranks whose samples together are the global batch; empty where only the samples show that
    data_ranks: Sequence[int] = (0,)


class _Phase(Enum):
    """How far a step has come: each phase leads to the next, and the last to another step."""

    WAITING = auto()  # for its first forward pass
    GRADIENTS = auto()  # are made, reduced and clipped
    UPDATES = auto()  # an optimizer was called; the next forward pass ends the step


@dataclass(slots=True)
class _Step:
    """The step that is being recorded."""

    phase: _Phase = _Phase.WAITING
    figures: dict[str, TensorFigures] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    labels: Labels | None = None
    elements: dict[str, Labels] = field(default_factory=dict)  # of the model's inputs, by name
    passes: int = 0
    unclipped: dict[str, TensorFigures] = field(default_factory=dict)
    before: dict[str, Tensor | Part] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)


def _recorded(work: Callable[..., None]) -> Callable[..., None]:
    """Call a method outside of the training's surroundings; a failure ends the record alone."""

    @functools.wraps(work)
    def call(self: "ParityRecorder", *args: Any, **more: Any) -> None:
        if not self.active:
            return
        try:
            with torch.no_grad():
                outside(functools.partial(work, self, *args, **more))
        except Exception as error:
            self.fail(error)

    return call


class ParityRecorder(Probe):
    """Records the first steps of a model.

    The calls of a step come in this order: :meth:`on_inputs`, :meth:`on_output`,
    :meth:`see_roots`, :meth:`see_reduced`, :meth:`see_update`, :meth:`after_update`.
    """

    repeating = False  # no pass is the recorder's own

    def __init__(
        self,
        module: nn.Module,
        place: RecordPlace,
        num_steps: int,
        start: Start | None = None,
        *,
        first_step: int = 0,
        rules: Sequence[Rule] = (),
        bisects: bool = False,
        wrapper: object = None,
        optimizers: Sequence[Any] = (),
    ) -> None:
        self._module = module
        self._place = place
        self._last = first_step + num_steps
        self._start = start
        self.present_step = first_step
        self._first = first_step
        self._failed = ""
        self._now = _Step()
        named = [*module.named_parameters(), *_float_buffers(module)]
        self._names = {id(tensor): canonical_name(name) for name, tensor in named}
        own = {canonical_name(n): size_of(t) for n, t in named}
        experts = DealtExperts(module) if place.world > 1 else None
        self._naming = naming = Naming(rules, own, experts.pieces if experts else {})
        self._shapes = {naming.of(name): naming.shape(name, own[name]) for name in own}
        doubled = {naming.of(canonical_name(n)) for n, t in named if t.is_complex()}
        sizes = {n: math.prod(shape) * (1 + (n in doubled)) for n, shape in self._shapes.items()}
        self._megatron = MegatronBuffers(wrapper, self._names) if is_megatron(wrapper) else None
        firsts = {} if self._megatron is None else self._megatron.firsts
        copies = trained_copies(optimizers, module.parameters())
        self._held = HeldElements(module, self._names, firsts, copies)
        self._trained = {id(p) for p in module.parameters() if p.requires_grad}
        device = next((t.device for _, t in named), torch.device("cpu"))
        self._meter = FigureMeter(
            sizes, device, placed=lambda name, part: (naming.of(name), naming.placed(name, part))
        )
        self._inside = False  # of a forward pass
        self._outputs: LayerOutputs | None = None
        if bisects:
            name_of = experts.name if experts else str
            self._outputs = LayerOutputs(module, self._see_output, lambda: self._inside, name_of)
        self._shifted = shifts_labels(module)
        self._samples = SampleMeter()
        self._losses = LossMeter(shifted=self._shifted)
        self._random = RandomMeter(device)
        self._compute = torch.float32
        self._drew: list[str] = []
        self._others: set[str] = set()
        self._inner_hooks: list[Any] = []
        self._stops: list[Callable[[], object]] = []
        if CLIP.exists:
            self._stops.append(CLIP.subscribe(before=self._see_clipping))
        if self._megatron is not None:
            self._stops.append(self._megatron.subscribe(self._see_synchronised))

    @property
    def active(self) -> bool:
        """Whether it still records."""
        return not self._failed and self.present_step < self._last

    @property
    def training(self) -> bool:
        """Whether the present forward pass counts."""
        return self.active and torch.is_grad_enabled()

    @_recorded
    def loss(self, value: Any, weight: Any = None, **more: Any) -> None:
        """Take a loss: see :meth:`rankscope.Scope.loss`."""
        self._losses.give(value, weight, **more)

    def give_loss(self, value: Any, weight: Any, forward: int, **more: Any) -> None:
        """Take the loss that the user has given of a micro-batch."""
        self.loss(value, weight, **more)

    @_recorded
    def give_samples(self, samples: Any, forward: int) -> None:
        """Take the identity of samples: see :meth:`rankscope.Scope.batch`."""
        self._samples.give(samples)

    def see_other(self, optimizer: Any) -> None:
        """An optimizer is called that trains what is not in the model."""
        self._others.add(type(optimizer).__name__)

    def close(self) -> None:
        """Write the last step, and listen no more."""
        self._end_step()
        for stop in self._stops:
            stop()
        self._forget_inner_hooks()
        if self._outputs is not None:
            self._outputs.remove()

    def knows(self, optimizer: Any) -> bool:
        """Return whether an optimizer holds a parameter of the model."""
        return any(
            self._held.in_tensor(p) for each in all_of(optimizer) for p in parameters_of(each)
        )

    def fail(self, error: Exception) -> None:
        """End the record, and mark its files as ended."""
        self._failed = f"{type(error).__name__}: {error}"
        self._now = _Step()
        _log.warning("parity records no more of this training: %s", self._failed, exc_info=True)
        try:
            failed = {"failed": self._failed}
            self._write(RankStep(self._place.rank, self.present_step, failed, {}))
        except Exception:
            _log.debug("nor could it write that", exc_info=True)

    @_recorded
    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """A forward pass of the training begins: the first one after an update ends a step."""
        self._end_step()
        if not self.active:
            return
        if self._now.phase is _Phase.WAITING:
            self._begin_step()
        now = self._now
        now.passes += 1
        if any(each.requires_grad for each in tensors_in((args, dict(kwargs)))):
            now.facts["fed"] = True  # by another rank: a later stage of a pipeline
        self._samples.see(args, kwargs)
        for name, elements in elements_among(args, kwargs).items():
            now.elements[name] = now.elements.get(name, Labels()).plus(elements)
        labels = labels_among(kwargs, shifted=self._shifted)
        if labels is not None:
            now.facts["given labels"] = now.facts.get("given labels", Labels()).plus(labels)
        self._random.before_forward()
        self._inside = True

    @_recorded
    def go_on(self) -> None:
        """A micro-batch goes on in another stage of this rank."""
        self._random.before_forward()
        self._inside = True

    def _begin_step(self) -> None:
        now = self._now
        now.phase = _Phase.GRADIENTS
        first = self.present_step == self._first
        now.facts["random"] = {name: str(one) for name, one in self._random.held().items()}
        if first:
            now.facts["shapes"] = self._shapes
            now.facts["trained"] = [
                self._naming.of(n) for i, n in self._names.items() if i in self._trained
            ]
            now.facts["types"] = sorted({str(p.dtype) for p in self._module.parameters()})
            self._watch_inside()
            if self._start is not None:
                set_up(self._start, self._module, self._place.rank, self._naming, self._held)
        now.figures[START] = self._meter.measure(self._named(self._module.parameters()))
        buffers = [b for _, b in _float_buffers(self._module)]
        now.figures[BUFFER] = self._meter.measure(self._named(buffers))
        if first and self._start is not None:
            self._start.perturb(self._module, self._held)

    @_recorded
    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """A forward pass of the training has ended."""
        self._inside = False
        self._random.after_forward()
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            self._add_labels(labels_before([loss]))
        self._losses.see(output, kwargs)

    @_recorded
    def _see_output(self, kind: str, name: str, tensor: Tensor) -> None:
        if self._outputs is not None and self._now.phase is not _Phase.WAITING:
            self._outputs.add(kind, name, tensor)

    @_recorded
    def see_roots(self, roots: Sequence[Any]) -> None:
        """A backward pass is about to begin."""
        if self._now.labels is None or "labels by root" in self._now.facts:
            found = labels_before([r for r in roots if isinstance(r, Tensor)])
            if found is not None:
                self._now.facts["labels by root"] = True
            self._add_labels(found)

    def _add_labels(self, labels: Labels | None) -> None:
        if labels is not None:
            self._now.labels = (self._now.labels or Labels()).plus(labels)

    @_recorded
    def see_reduced(self) -> None:
        """A backward pass has ended, and its reduction."""
        if self._megatron is None:
            self._keep_unclipped(self._gradients())

    @_recorded
    def _see_synchronised(self, *args: Any, **more: Any) -> None:
        """Megatron-core has reduced its buffers."""
        if self._megatron is not None:
            self._keep_unclipped(self._megatron.gradients)

    def _keep_unclipped(self, gradients: Sequence[Named]) -> None:
        if self._now.phase is _Phase.GRADIENTS:
            self._now.unclipped = {UNCLIPPED: self._meter.measure(gradients)}
            self._now.facts.pop("clipping seen", None)

    @_recorded
    def _see_clipping(self, parameters: Any, max_norm: Any, *args: Any, **more: Any) -> None:
        """Keep the gradients that the training is about to clip, which it may have unscaled."""
        now = self._now
        if now.phase is not _Phase.GRADIENTS:
            return
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(id(p) in self._names for p in several):
            return
        now.facts.setdefault("limits", []).append(float(max_norm))
        if "clipping seen" not in now.facts:
            now.facts["clipping seen"] = True
            now.unclipped = {UNCLIPPED: self._meter.measure(self._gradients())}

    @_recorded
    def see_update(self, optimizer: Any) -> None:
        """An optimizer, or several as one, is about to be called."""
        now = self._now
        if now.phase is _Phase.WAITING:
            return
        now.phase = _Phase.UPDATES
        now.facts["scaler"] = scaler_around()
        for each in all_of(optimizer):
            if any(p.grad is not None and not self._held.in_tensor(p) for p in parameters_of(each)):
                self.see_other(each)
        given = [  # in flat tensors
            (name, part(flat.grad))
            for each in all_of(optimizer)
            for flat in parameters_of(each)
            if id(flat) not in self._names and flat.grad is not None
            for name, part in self._held.in_tensor(flat)
        ]
        if given or GRADIENT not in now.figures:
            gradients = given or self._gradients()
            figures = self._meter.measure(gradients)
            self._add(GRADIENT, figures)
            off = _rounding_of_norm(gradients, figures)
            now.facts["norm rounding"] = max(off, now.facts.get("norm rounding", 0.0))
        if self.present_step == self._first and any(held.state for held in held_by(optimizer)):
            now.figures.update(self._moments(optimizer, HELD))
            now.facts["held counters"] = {
                **now.facts.get("held counters", {}), **self._counters(optimizer)
            }  # fmt: skip
        for each in all_of(optimizer):
            for parameter in parameters_of(each):
                held = self._held.in_tensor(parameter)
                copy = parameter.detach().clone() if held else parameter
                now.before.update((name, part(copy)) for name, part in held)

    @_recorded
    def after_update(self, optimizer: Any, *, complete: bool = True) -> None:
        """An optimizer has been called."""
        now = self._now
        if now.phase is _Phase.WAITING:
            return
        after = [
            (name, part(p))
            for each in all_of(optimizer)
            for p in parameters_of(each)
            for name, part in self._held.in_tensor(p)
            if name in now.before
        ]
        self._add(UPDATE, self._meter.differences(after, now.before))
        for name, _ in after:
            now.before.pop(name, None)
        for kind, figures in self._moments(optimizer, MOMENT).items():
            self._add(kind, figures)
        now.counters.update(self._counters(optimizer))
        for each in all_of(optimizer):
            now.settings += [settings_of(each, group) for group in each.param_groups]

    def _add(self, kind: str, figures: TensorFigures) -> None:
        known = self._now.figures.get(kind)
        self._now.figures[kind] = figures if known is None else known.plus(figures)

    def _moments(self, optimizer: Any, kind: str) -> dict[str, TensorFigures]:
        by_moment: dict[str, list[Named]] = {}
        for held in held_by(optimizer):
            for key, (name, part) in itertools.product(
                held.moments, self._held.in_tensor(held.whole)
            ):
                value = like_parameter(held.whole, state_of(optimizer, held).get(key))
                if not isinstance(value, Tensor) or value.shape != held.whole.shape:
                    continue
                if not (value.is_floating_point() or value.is_complex()):
                    self._now.facts.setdefault("moments not measured", {})[key] = str(value.dtype)
                else:
                    by_moment.setdefault(f"{kind}{key}", []).append((name, part(value)))
        return {key: self._meter.measure(named) for key, named in by_moment.items()}

    def _counters(self, optimizer: Any) -> dict[str, float]:
        counters: dict[str, float] = {}
        for held in held_by(optimizer):
            if held.counter is not None:
                of = self._held.in_tensor(held.whole)
                counters.update((self._naming.of(n), float(held.counter)) for n, _ in of)
        return counters

    @_recorded
    def _end_step(self) -> None:
        now = self._now
        if now.phase is not _Phase.UPDATES:
            return
        losses, multipliers = self._losses.collect()
        arrays = read_losses(losses, multipliers, 1.0).arrays
        samples = [np.asarray(s if isinstance(s, np.ndarray) else s.numpy(), np.int64).reshape(-1)
                   for s in self._samples.collect()]  # fmt: skip
        used = int(self._random.collect().get("rng_used", 0))
        given = now.facts.pop("given labels", None)
        labels = now.labels or given
        now.facts.pop("labels by root", None)
        facts = {
            **now.facts,
            "world": self._place.world,
            "data_ranks": list(self._place.data_ranks),
            "passes": now.passes,
            "compute": str(self._compute),
            "labels": None if labels is None else list(labels),
            "elements": {name: list(each) for name, each in now.elements.items()},
            "counters": now.counters,
            "settings": now.settings,
            "drew": self._drew,
            "others": sorted(self._others),
            "drawn": bool(used & OF_TORCH),
        }
        figures = {**now.unclipped, **now.figures}
        if self._outputs is not None:
            of_layers, facts["outputs"] = self._outputs.collect()
            figures |= of_layers
        numbers = [
            np.frombuffer(bytes(arrays.get(name, b"")), np.float64)
            for name in ("losses_U", "weights_U", "multipliers_M")
        ]
        ids = np.concatenate([np.empty(0, np.int64), *samples])
        step = self.present_step
        self._write(RankStep(self._place.rank, step, facts, figures, ids, *numbers))
        self._forget_inner_hooks()
        self._now = _Step()
        self.present_step += 1

    def _write(self, step: RankStep) -> None:
        folder = self._place.folder / folder_of_rank(self._place.rank)
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_folder(folder, 0o755)
        replace(folder / file_of_step(step.step), step.pack())

    def _gradients(self) -> list[Named]:
        return [
            (self._names[id(p)], p.grad)
            for p in self._module.parameters()
            if p.grad is not None and id(p) in self._names
        ]

    def _named(self, tensors: Iterable[Tensor]) -> list[Named]:
        return [(self._names[id(t)], stored(t)) for t in tensors if id(t) in self._names]

    # Inside of the first forward pass ---------------------------------------------------------

    def _watch_inside(self) -> None:
        """See in one pass of each layer whether it draws random numbers, and in which type."""
        if any(getattr(m, "_compiled_call_impl", None) for m in self._module.modules()):
            return
        for name, module in self._module.named_modules():
            if any(True for _ in module.children()) or not takes_hooks(module):
                continue
            watch = LayerHooks(self.see_layer, canonical_name(name) or type(module).__name__)
            watch.hooks += [
                module.register_forward_pre_hook(watch.before),
                module.register_forward_hook(watch.after),
            ]
            self._inner_hooks += watch.hooks

    def _forget_inner_hooks(self) -> None:
        for hook in self._inner_hooks:
            hook.remove()
        self._inner_hooks.clear()

    def see_layer(self, name: str, output: Any, *, drew: bool) -> None:
        """A layer of the model has computed."""
        if drew and len(self._drew) < _MOST_DREW and name not in self._drew:
            self._drew.append(name)
        if isinstance(output, Tensor) and output.dtype in _COARSE:
            coarser = _COARSE[output.dtype] > _COARSE.get(self._compute, 0.0)
            self._compute = output.dtype if coarser else self._compute


def _float_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]


def _rounding_of_norm(gradients: Iterable[Named], exact: TensorFigures) -> float:
    """Return how far torch's norm is off, which adds up on a CPU in the gradient's type."""
    norms = [torch.linalg.vector_norm(part_of(g).tensor).cpu().double() for _, g in gradients]
    square = float(exact.squares_PQ.sum())
    if not norms or not 0 < square < math.inf:
        return 0.0
    return abs(float(torch.stack(norms).norm()) / math.sqrt(square) - 1)


class ParityProbe(ParityRecorder):
    """Records a training that has a session."""

    def __init__(self, job: Job) -> None:
        ranks = ranks_of(job.wrapped.group)
        wrapped = job.wrapped
        optimizers = all_of(job.optimizer)
        place = RecordPlace(
            Path(job.given_dir) / FOLDER, dist.get_rank(), dist.get_world_size(), tuple(ranks)
        )
        super().__init__(
            wrapped.module, place, job.parity, wrapper=wrapped.wrapper, optimizers=optimizers
        )
        self._optimizer = job.optimizer

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to be called: what all of them hold is kept at the first call."""
        if self._now.phase is _Phase.GRADIENTS:
            self.see_update(self._optimizer)


def make_probe(job: Job) -> ParityProbe | None:
    """Return the probe; None where nothing is to be recorded."""
    if not job.parity or not all_of(job.optimizer):
        return None
    return ParityProbe(job)


def make_recorder(
    model: nn.Module, place: Mapping[str, Any], start: Mapping[str, Any], **more: Any
) -> ParityRecorder:
    """Return the recorder of a training without a session; ``start`` are changes before it."""
    return ParityRecorder(model, RecordPlace(**place), start=Start(**start), **more)
