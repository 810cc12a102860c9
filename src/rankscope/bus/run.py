"""What is known of a run before its first step, and what its judges share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.bus.plan import Plan

Ranks = Callable[[], Sequence[int]]
"""Returns some ranks, as they are known at the moment of the call."""


def _nobody() -> Sequence[int]:
    return ()


@dataclass(slots=True)
class FlaggedWorkers:
    """Workers that one judge knows to differ, for others to leave out; filled in by that judge.

    Attributes:
        now: Those that were found to differ from the others.
        steadily: Those of them that differ in most steps.
        left_out: Those that are not compared in the present step.
    """

    now: Ranks = _nobody
    steadily: Ranks = _nobody
    left_out: Ranks = _nobody


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What judges are made for.

    Attributes:
        num_workers: W.
        hosts: Host of each rank; empty when unknown.
        environments: Environment of each rank; empty when unknown.
        plan: What the run is meant to do.
        reduced_in: By group, the type in which its gradient is meant to be reduced; None if
            unknown.
        comm_hook: Whether a communication hook of the training's own reduces gradients.
        sampler_seeds: Seed of each rank's sampler, None where it is not known.
        with_replacement: Whether all ranks' data loaders are known to draw with replacement.
        by_loop: Whether the training's own loop reduces, or its optimizer.
        flagged: Workers that judges leave out.
    """

    num_workers: int
    hosts: Sequence[str] = ()
    environments: Sequence[Mapping[str, Any]] = ()
    plan: Plan = field(default_factory=Plan)
    reduced_in: Mapping[str, str] | None = None
    comm_hook: bool = False
    sampler_seeds: Sequence[int | None] = ()
    with_replacement: bool = False
    by_loop: bool = False
    flagged: FlaggedWorkers = field(default_factory=FlaggedWorkers)

    @property
    def repeats(self) -> bool:
        """Whether workers are meant to repeat each other's samples."""
        return self.plan.repeats
