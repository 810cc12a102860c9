"""Which instruments measure a model: chosen once, by how it is wrapped and by what is asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.layout import Layout
from rankscope.capture import GradientTap, NormMeter, ReadReduced, Sketcher
from rankscope.capture.loss import shifts_labels
from rankscope.capture.state.exact_evidence import EvidenceMeter, ExactEvidence, NoEvidence
from rankscope.capture.state.meter import StateMeter
from rankscope.capture.state.trace import TraceMeter
from rankscope.capture.taps.fsdp2_lasting import LastingParameters
from rankscope.capture.taps.reduced_types import reduced_types
from rankscope.capture.taps.tap import GradientObserver, Guarded
from rankscope.core.audit import AUDIT_WIDTH
from rankscope.core.groups import (
    SECTION_ELEMENTS,
    Groups,
    Sections,
    cut_sections,
    group_parameters,
)
from rankscope.core.pace import PACE
from rankscope.core.plan import Tier
from rankscope.core.step import MAX_PAIRED_WORKERS as MAX_PAIRED
from rankscope.errors import UnsupportedError, UsageError
from rankscope.reduce.exact import ExactGram, check_exact
from rankscope.session.kinds import FSDP2, LOOP, MEGATRON
from rankscope.session.options import WatchOptions
from rankscope.session.wrapping import Wrapped

GROUP_WIDTH = 251
"""Numbers in the sketch of a group: its cosines err by 0.06 at most."""

STATE_SPACING = PACE.state_spacing
"""Steps from one reading of the model's state to the next, where there is a budget to keep."""


MakeTraceMeter = Callable[[torch.optim.Optimizer | None, Callable[[float], None]], TraceMeter]


@dataclass(frozen=True, slots=True)
class Instruments:
    """What measures one model.

    Attributes:
        make_tap: Makes the tap, given a guard, a observer, and what to call after a step that this
            rank only shadows.
        make_evidence_meter: Makes what is told of the moments of a step, given the optimizer.
        module: The model inside the wrapper.
        replica: Workers with equal numbers hold the same parameters; None where each parameter has
            one owner.
        reduced: What is read of the reduced gradient.
        layout: What a step's message holds.
        every: Gradients are measured in steps that are multiples of this.
        groups: Names of the parameter groups, and which parameter belongs to which.
        device: Where the gradients live.
        shifted_labels: Whether the model predicts the next token, so that the first label of each
            sequence is not a target.
        make_exact: Puts the reduction that yields exact inner products into the model, in the
            exact tier; all ranks call it at the same point.
        make_trace_meter: Makes what traces the training, for rank 0 alone, given the optimizer and
            what takes the seconds that it spends; None without traces.
        reduced_in: Where the reduction is audited, for each group the type in which its gradient
            is meant to be reduced; else None.
        local_steps: Steps from one average of the workers' parameters to the next; 0 where every
            step's gradients are reduced.
        take_read_seconds: Returns how long reading gradients has taken since its last call.
    """

    make_tap: Callable[[Guarded, GradientObserver, Callable[[], None]], GradientTap]
    make_evidence_meter: Callable[[torch.optim.Optimizer | None], EvidenceMeter]
    module: torch.nn.Module
    replica: int | None
    reduced: ReadReduced
    layout: Layout
    every: int
    groups: Groups
    device: torch.device
    shifted_labels: bool
    take_read_seconds: Callable[[], float]
    make_exact: Callable[[Guarded], ExactGram] | None = None
    make_trace_meter: MakeTraceMeter | None = None
    reduced_in: Mapping[str, str] | None = None
    local_steps: int = 0


def choose_instruments(
    wrapped: Wrapped,
    options: WatchOptions,
    tier: Tier = Tier.SKETCH,
    *,
    local_steps: int = 0,
    loader: Any = None,
) -> Instruments:
    """Return what measures a model.

    Args:
        wrapped: The model as it goes data parallel.
        options: What is asked for.
        tier: How much of the gradients is compared.
        local_steps: See :class:`Instruments`.
        loader: The training's data loader; None if it was not given.

    Raises:
        UsageError: An option cannot work.
        UnsupportedError: The tier does not fit the way the model is wrapped.
    """
    if not wrapped.parameters:
        raise UsageError("watch() expected a model with parameters that require a gradient")
    reduced = _reads(wrapped, options, tier)
    if tier is Tier.EXACT:
        check_exact(wrapped.wrapper)
    if options.trace and not wrapped.kind.traces:
        raise UnsupportedError(
            "trace=True expected a model under DDP, where rank 0 holds whole parameters and "
            f"gradients, got {wrapped.kind}; leave it out"
        )
    groups = group_parameters(wrapped.parameters, options.groups)
    sketches = tier is not Tier.SCALARS
    meter = Sketcher if sketches else NormMeter
    sections = _sections(wrapped, groups) if reduced is ReadReduced.SKETCH else None
    sketcher = meter(wrapped.device, groups, options.sketch_width, options.seed, sections)
    num_workers = wrapped.group.size()
    if num_workers > MAX_PAIRED and tier is Tier.EXACT:
        raise UsageError(
            f"the exact tier compares up to {MAX_PAIRED} workers, got {num_workers}; use "
            "tier='sketch'"
        )
    layout = Layout(
        num_workers=num_workers,
        sketch_width=options.sketch_width if sketches else 0,
        groups=groups.names,
        group_width=GROUP_WIDTH if sketches and len(groups) > 1 else 0,
        section_counts=() if sections is None else sections.counts,
        audit_width=0 if sections is None else min(AUDIT_WIDTH, options.sketch_width),
        num_products=0 if sketches else 1,
        by_loop=wrapped.kind is LOOP,
    )

    def make_tap(
        guarded: Guarded, observer: GradientObserver, shadowed: Callable[[], None]
    ) -> GradientTap:
        return wrapped.make_tap(sketcher, guarded, reduced, observer, shadowed)

    def make_evidence_meter(optimizer: torch.optim.Optimizer | None) -> EvidenceMeter:
        if not options.evidence:
            return NoEvidence()
        state = StateMeter(
            wrapped.module,
            optimizer if _keeps_state_alike(wrapped, optimizer) else None,
            replicated=wrapped.replica is not None,
            reduces=wrapped.reduces(),
            broadcasts=wrapped.broadcasts(),
            left_out=wrapped.left_out(),
            lasting=_lasting(wrapped),
            device=wrapped.device,
            spacing=1 if options.overhead_budget is None else STATE_SPACING,
            local_steps=local_steps,
            sums_by_hand=wrapped.mesh is not None,
            shards=wrapped.kind is FSDP2 and wrapped.mesh is None,
        )
        return ExactEvidence(
            wrapped.module,
            wrapped.device,
            state,
            loader,
            updates_all=not local_steps and _updates_all(wrapped, optimizer),
        )

    return Instruments(
        make_tap=make_tap,
        make_evidence_meter=make_evidence_meter,
        module=wrapped.module,
        replica=wrapped.replica,
        reduced=reduced,
        layout=layout,
        every=options.every,
        groups=groups,
        device=wrapped.device,
        shifted_labels=shifts_labels(wrapped.module),
        take_read_seconds=sketcher.take_seconds,
        reduced_in=None if sections is None else _reduced_in(wrapped, groups),
        make_exact=_make_exact(wrapped) if tier is Tier.EXACT else None,
        make_trace_meter=_make_trace_meter(wrapped, options.every) if options.trace else None,
        local_steps=local_steps,
    )


def _reads(wrapped: Wrapped, options: WatchOptions, tier: Tier) -> ReadReduced:
    """Return what is read of the reduced gradient.

    Of a loop that reduces by itself, sketches of up to 64 workers alone tell whether it is a mean.
    """
    reduced = options.reads(tier)
    told = reduced is ReadReduced.SKETCH and wrapped.group.size() <= MAX_PAIRED
    return ReadReduced.OFF if wrapped.kind is LOOP and not told else reduced


def _reduced_in(wrapped: Wrapped, groups: Groups) -> dict[str, str]:
    return reduced_types(wrapped.wrapper, wrapped.parameters, groups)


def _sections(wrapped: Wrapped, groups: Groups) -> Sections:
    sizes = {name: _elements(parameter) for name, parameter in wrapped.parameters.items()}
    return cut_sections(sizes, groups, section_elements=SECTION_ELEMENTS)


def _lasting(wrapped: Wrapped) -> LastingParameters | None:
    if wrapped.kind is not FSDP2:
        return None
    return LastingParameters(wrapped.wrapper, dist.get_process_group_ranks(wrapped.group))


def _updates_all(wrapped: Wrapped, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether each worker holds the new parameters as soon as ``optimizer.step`` returns.

    Not where DeepSpeed gathers them afterwards, nor where the optimizer that is known holds a part
    of them: others update the rest, perhaps on other workers.
    """
    if optimizer is None or not wrapped.kind.updates_at_once:
        return False
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return all(id(parameter) in held for parameter in wrapped.parameters.values())


def _keeps_state_alike(wrapped: Wrapped, optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer's state can be told by parameter, and is the same on replicas.

    DeepSpeed's is sharded, or flat; Megatron-core's, where it updates copies of the parameters.
    """
    if wrapped.kind is MEGATRON:
        return _updates_all(wrapped, optimizer)
    return wrapped.kind.state_by_parameter


def _elements(parameter: torch.Tensor) -> int:
    """Return how many real numbers a parameter's gradient has."""
    count = getattr(parameter, "ds_numel", None) or parameter.numel()  # ZeRO 3 empties it
    return int(count) * (2 if parameter.is_complex() else 1)


def _make_exact(wrapped: Wrapped) -> Callable[[Guarded], ExactGram]:
    def make(guarded: Guarded) -> ExactGram:
        assert isinstance(wrapped.wrapper, DistributedDataParallel)  # check_exact said so
        return ExactGram.register(wrapped.wrapper, guarded)

    return make


def _make_trace_meter(wrapped: Wrapped, every: int) -> MakeTraceMeter:
    def make(
        optimizer: torch.optim.Optimizer | None, leave_out: Callable[[float], None]
    ) -> TraceMeter:
        parameters, device = wrapped.parameters, wrapped.device
        return TraceMeter(
            wrapped.module, parameters, device, optimizer, every=every, leave_out=leave_out
        )

    return make
