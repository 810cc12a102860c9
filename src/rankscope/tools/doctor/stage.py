"""What the preflight is made of: stages, each looked at by every worker and judged by rank 0."""

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
"""What each stage and each check is about, in a few words."""

Facts = Mapping[str, Any]
"""What one worker saw of a check: plain JSON values, keys are strings."""


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

    Attributes:
        name: Stable name, one of ``TITLES``.
        status: How it ended.
        found: What was found, in a sentence.
        advice: What to do about it; empty when there is nothing to do.
        numbers: The numbers behind it, as plain JSON values.
        ranks: The ranks concerned; empty when it concerns all alike.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """What was checked, in a few words."""
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
    """What the user asks for.

    Attributes:
        model: ``MODULE:FUNCTION`` that builds the model, or None.
        optimizer: ``MODULE:FUNCTION`` that takes the model and returns its optimizer, or None.
        loader: ``MODULE:FUNCTION`` that returns this rank's batches, or None.
        batches: Batches that each rank reads at most.
        seconds: How long a worker may take for one stage.
    """

    model: str | None = None
    optimizer: str | None = None
    loader: str | None = None
    batches: int = 200
    seconds: float = 20.0


@dataclass(slots=True)
class Bench:
    """What a worker's checks work with.

    Attributes:
        place: Who this worker is.
        options: What the user asks for.
        store: Where the process group of the preflight meets.
        device: This worker's device.
        functions: The user's functions, by option.
        model: The user's model, once it has been built.
        batch: The first batch of the user's loader, once it has been read.
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
        look: Sees to it on one worker; what it returns goes to rank 0.
        judge: Turns what all workers saw, in rank order, into results.
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
        """What it is about, in a few words."""
        return TITLES[self.topic]
