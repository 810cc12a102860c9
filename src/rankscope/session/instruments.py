"""Chooses the instruments of a model and its job, by its wrapper and the options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rankscope.bus.groups import (
    SECTION_ELEMENTS,
    Groups,
    Sections,
    cut_sections,
    group_parameters,
)
from rankscope.bus.messages import Layout
from rankscope.bus.pace import PACE
from rankscope.bus.plan import Tier
from rankscope.bus.probe import Job
from rankscope.bus.step import MAX_PAIRED_WORKERS as MAX_PAIRED
from rankscope.bus.words import shortened
from rankscope.errors import UnsupportedError, UsageError
from rankscope.gradients.sketch import NormMeter, Sketcher
from rankscope.session.options import WatchOptions
from rankscope.stats.audit import AUDIT_WIDTH
from rankscope.wrappers.tap import ReadReduced
from rankscope.wrappers.wrapped import Wrapped, reduced_types, trained_in

GROUP_WIDTH = 251  # width of the sketch of a group: its cosines err by 0.06 at most

STATE_SPACING = PACE.state_spacing
"""Steps from one reading of the model's state to the next, where there is a budget to keep."""


@dataclass(frozen=True, slots=True)
class Instruments:
    """The instruments of one model."""

    sketcher: Sketcher
    reduced: ReadReduced  # how the reduced gradient is read
    layout: Layout
    groups: Groups
    # where the reduction is audited, for each group the type in which its gradient is meant to be
    # reduced; else None
    reduced_in: Mapping[str, str] | None


def choose_instruments(
    wrapped: Wrapped, options: WatchOptions, tier: Tier = Tier.SKETCH
) -> Instruments:
    """Return the instruments of a model."""
    if not wrapped.parameters:
        trained = list(trained_in(wrapped.module))
        if not trained:
            raise UsageError("watch() expected a model with parameters that require a gradient")
        raise UnsupportedError(
            f"watch() expected parameters whose gradients {wrapped.kind} reduces, got "
            f"{shortened(trained, 3)}, which it does not manage: each worker would train its own; "
            "add adapters before the model is wrapped"
        )
    reduced = _reads(wrapped, options, tier)
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
    layout = Layout(
        num_workers=wrapped.group.size(),
        sketch_width=options.sketch_width if sketches else 0,
        groups=groups.names,
        group_width=GROUP_WIDTH if sketches and len(groups) > 1 else 0,
        section_counts=() if sections is None else sections.counts,
        audit_width=0 if sections is None else min(AUDIT_WIDTH, options.sketch_width),
        by_loop=wrapped.kind.by_loop,
    )
    reduced_in = None
    if sections is not None:
        reduced_in = reduced_types(wrapped.gradient_types(), groups)
    return Instruments(
        sketcher=sketcher,
        reduced=reduced,
        layout=layout,
        groups=groups,
        reduced_in=reduced_in,
    )


def job_of(
    wrapped: Wrapped,
    optimizer: torch.optim.Optimizer | None,
    options: WatchOptions,
    first_step: int = 0,
    **more: Any,
) -> Job:
    """Return the job that probes are made for, with more of its fields."""
    rank = dist.get_rank(wrapped.group)
    return Job(
        wrapped=wrapped,
        optimizer=optimizer,
        rank=rank,
        exact=options.evidence,
        trace=options.trace and rank == 0,
        every=options.every,
        state_spacing=1 if options.overhead_budget is None else STATE_SPACING,
        first_step=first_step,
        seed=options.seed,
        canary_every=options.canary_every,
        verify_at=[*options.verify_at, *(first_step + later for later in PACE.references)],
        parity=options.parity,
        **more,
    )


def _reads(wrapped: Wrapped, options: WatchOptions, tier: Tier) -> ReadReduced:
    """Return how the reduced gradient is read.

    In a loop that reduces by itself, only sketches of up to 64 workers show whether it is a mean.
    """
    reduced = options.reads(tier)
    is_audited = reduced is ReadReduced.SKETCH and wrapped.group.size() <= MAX_PAIRED
    return ReadReduced.OFF if wrapped.kind.by_loop and not is_audited else reduced


def _sections(wrapped: Wrapped, groups: Groups) -> Sections:
    sizes = {name: _elements(parameter) for name, parameter in wrapped.parameters.items()}
    return cut_sections(sizes, groups, section_elements=SECTION_ELEMENTS)


def _elements(parameter: torch.Tensor) -> int:
    """Return the number of real numbers in a parameter's gradient."""
    count = getattr(parameter, "ds_numel", None) or parameter.numel()  # ZeRO 3 empties it
    return int(count) * (2 if parameter.is_complex() else 1)
