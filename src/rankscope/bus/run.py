"""Facts of a run before its first step, and state that its judges share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.bus.plan import Plan

Ranks = Callable[[], Sequence[int]]
"""Returns ranks, as of the moment of the call."""


def _nobody() -> Sequence[int]:
    return ()


@dataclass(slots=True)
class FlaggedWorkers:
    """Workers that the outlier judge has flagged; other judges leave them out.

    Attributes:
        now: Workers that differ from the others at present.
        steadily: Those of them that differ in most steps.
        left_out: Workers that are not compared in the present step.
    """

    now: Ranks = _nobody
    steadily: Ranks = _nobody
    left_out: Ranks = _nobody


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that judges are made for.

    Attributes:
        num_workers: W.
        hosts: Host of each rank; empty when unknown.
        environments: Environment of each rank; empty when unknown.
        plan: The user's plan for the run.
        reduced_in: By group, the type in which its gradient is meant to be reduced; None if
            unknown.
        comm_hook: Whether a communication hook of the training's own reduces gradients.
        sampler_seeds: Seed of each rank's sampler, None where it is not known.
        with_replacement: Whether all ranks' data loaders are known to draw with replacement.
        data_splits: What splits the data in the loader of the first rank, and into how many parts.
        data_length: How many samples the data set has; None if unknown.
        unsaved_buffers: Names of buffers that no checkpoint holds.
        world_size: Number of processes of the job; 0 if unknown.
        by_loop: Whether the training's own loop reduces, or its optimizer.
        flagged: Workers that some judges leave out.
    """

    num_workers: int
    hosts: Sequence[str] = ()
    environments: Sequence[Mapping[str, Any]] = ()
    plan: Plan = field(default_factory=Plan)
    reduced_in: Mapping[str, str] | None = None
    comm_hook: bool = False
    sampler_seeds: Sequence[int | None] = ()
    with_replacement: bool = False
    data_splits: Sequence[tuple[str, int]] = ()
    data_length: int | None = None
    unsaved_buffers: Sequence[str] = ()
    world_size: int = 0
    by_loop: bool = False
    flagged: FlaggedWorkers = field(default_factory=FlaggedWorkers)

    @property
    def repeats(self) -> bool:
        """Whether workers are meant to repeat each other's samples."""
        return self.plan.repeats
