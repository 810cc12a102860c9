"""What the preflight is made of: stages, each looked at by every worker and judged by rank 0."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankscope.doctor.launcher import Place
from rankscope.doctor.meeting import Store
from rankscope.doctor.result import CheckResult, Facts


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

    place: Place
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
        topic: Its name, which is that of its result where it cannot be finished.
        title: What it is about, in a few words.
        look: Sees to it on one worker; what it returns goes to rank 0.
        judge: Turns what all workers saw, in rank order, into results.
        together: Whether workers wait for each other inside; after a failure of one of them
            nothing that needs the process group can follow.
        needs_group: Whether it needs the process group.
        blocks: Stages that cannot follow when this one fails.
        advice: What to do when ``look`` fails.
    """

    topic: str
    title: str
    look: Callable[[Bench], Facts]
    judge: Callable[[Sequence[Facts]], list[CheckResult]]
    together: bool = False
    needs_group: bool = True
    blocks: tuple[str, ...] = ()
    advice: str = ""
