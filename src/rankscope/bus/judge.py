"""How a kind of evidence turns the messages of all workers into a step, at the root.

Legend of shapes: W workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.step import MISSING_INT

Columns = Mapping[str, NDArray[Any]]
"""The workers' LOCAL columns ``[W]`` by name, to be filled in place."""


class Message(Protocol):
    """One worker's step; its arrays are attributes, named as evidence declares them."""

    step: int
    time: float
    items: int

    def __getattr__(self, name: str) -> NDArray[Any]: ...

    @property
    def measured(self) -> bool:
        """Whether it holds a gradient."""

    def replace(self, **arrays: Any) -> "Message":
        """Return the same message with other arrays."""


class Combiner:
    """Turns the messages of all workers into their common step.

    The ``combine.py`` of a kind of evidence has ``make_combiner(layout)``, called once for a run.
    """

    def learn(self, rank: int, message: Message) -> None:
        """Process a message on arrival, before its step is complete."""

    def combine(self, messages_W: Sequence[Message], columns: Columns) -> Mapping[str, Any]:
        """Fill in columns of the workers; return fields of :class:`GatheredStep`."""
        return {}


@dataclass(frozen=True, slots=True)
class Derived:
    """Values that one kind of evidence computes from those of all workers.

    Its ``combine.py`` has ``derive(gathered) -> Derived``. Gradient columns are NaN in a step that
    was not observed, sample columns where no worker named its samples.

    Attributes:
        steps: DERIVED columns of the steps table.
        workers: DERIVED columns of the workers table ``[W]``.
        report: Other fields of :class:`rankscope.bus.step.StepReport`.
    """

    steps: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


def fill(columns: Columns, rank: int, values: Mapping[str, float]) -> None:
    """Put a worker's values into its columns; NaN is missing."""
    for name, value in values.items():
        column = columns[name]
        if value == value:
            column[rank] = value
        else:
            column[rank] = MISSING_INT if column.dtype == np.int64 else np.nan
