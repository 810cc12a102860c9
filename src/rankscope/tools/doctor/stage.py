"""The parts of the preflight: stages, each run by every worker and judged by rank 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from rankscope.tools.doctor.meeting import RankPlace, Store

TITLES = {
    "topology": "Ranks and devices",
    "environment": "Environment",
    "model_function": "Function of --model",
    "optimizer_function": "Function of --optimizer",
    "loader_function": "Function of --loader",
    "process_group": "Process group",
    "collectives": "Collectives",
    "repeatability": "Repeated sums",
    "speed": "Speed",
    "bandwidth": "Bandwidth",
    "stragglers": "Slow ranks",
    "model": "Model and optimizer",
    "parameters": "Parameters",
    "buffers": "Buffers",
    "optimizer": "Optimizer",
    "random_numbers": "Random numbers",
    "batch_norm": "Batch normalisation",
    "loader": "Data",
    "shards": "Shards",
    "batch_counts": "Batch counts",
    "loss_weighting": "Loss weighting",
    "epoch_order": "Epoch order",
    "determinism": "Repeated steps",
}
"""Title of each stage and each check."""

Facts = Mapping[str, Any]
"""A worker's measurements for a check: plain JSON values, keys are strings."""


class Status(StrEnum):
    """How a check ended, mildest first."""

    SKIPPED = "skipped"
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def level(self) -> int:
        """Its place among all statuses: an error is the highest."""
        return list(Status).index(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the preflight's table.

    ``name`` is one of ``TITLES``; ``found`` is a sentence; ``advice`` is empty when there is
    nothing to do; ``numbers`` are plain JSON values; ``ranks`` is empty when it concerns all alike.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The title of the check."""
        return TITLES[self.name]

    def to_json(self) -> dict[str, Any]:
        """Return the result as the command's JSON document holds it."""
        return {
            "name": self.name,
            "title": self.title,
            "status": str(self.status),
            "found": self.found,
            "advice": self.advice,
            "ranks": list(self.ranks),
            "numbers": dict(self.numbers),
        }


def worst(results: Sequence[CheckResult]) -> Status:
    """Return the gravest status of all; ``OK`` when nothing was worse."""
    return max((result.status for result in results), key=lambda s: s.level, default=Status.OK)


def listed(names: Sequence[str], shown: int = 3, *, between: str = ", ") -> str:
    """Return the first names, and how many more there are: ``a, b, c and 2 more``."""
    more = f"{between.rstrip(', ')} and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more


def ranks_by(values: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks that have each value, given one value per rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options.

    Functions are ``MODULE:FUNCTION`` or None; ``batches`` is the most that each rank reads,
    ``seconds`` the time that a worker may take for one stage.
    """

    model: str | None = None
    optimizer: str | None = None
    loader: str | None = None
    batches: int = 200
    seconds: float = 20.0


@dataclass(slots=True)
class Bench:
    """The objects that a worker's checks work with.

    ``functions`` are the user's, by option; ``model`` is set once it was built, ``batch`` (the
    first one of the user's loader) once it was read.
    """

    place: RankPlace
    options: Options
    store: Store
    device: torch.device
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    model: Any = None
    batch: Any = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the preflight.

    Attributes:
        topic: Its name, one of ``TITLES``; that of its result where it cannot be finished.
        look: Measures on one worker; rank 0 gets its result.
        judge: Turns the facts of all workers, in rank order, into results.
        together: Whether workers wait for each other inside; after a failure of one of them
            nothing that needs the process group can follow.
        needs_group: Whether it needs the process group.
        blocks: Stages that cannot follow when this one fails.
        advice: What to do when ``look`` fails.
    """

    topic: str
    look: Callable[[Bench], Facts]
    judge: Callable[[Sequence[Facts]], list[CheckResult]]
    together: bool = False
    needs_group: bool = True
    blocks: tuple[str, ...] = ()
    advice: str = ""

    @property
    def title(self) -> str:
        """Its title."""
        return TITLES[self.topic]
