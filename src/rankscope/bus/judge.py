"""How a kind of evidence turns the messages of all workers into a step, at the root.

Legend of shapes: W workers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.messages import Messages
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import MISSING_INT
from rankscope.stats.arrays import Floats, Ints

Columns = Mapping[str, NDArray[Any]]
"""The workers' LOCAL columns ``[W]`` by name, to be filled in place."""


class Message(Protocol):
    """One worker's step; its arrays are attributes, named as evidence declares them."""

    def __getattr__(self, name: str) -> NDArray[Any]: ...


class Combiner:
    """Turns the messages of all workers into their common step.

    The ``combine.py`` of a kind of evidence has ``make_combiner(layout)``, called once for a run.
    """

    def learn(self, rank: int, message: Message) -> None:
        """Process a message on arrival, before its step is complete."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in columns of the workers; return fields of :class:`GatheredStep`.

        Tuples that several combiners return for one field are joined.
        """
        return {}


class HeldValues(Combiner):
    """Records integers that workers send in a few steps, such as digests of what they hold.

    A message has them among its names, by kind of state and by name.

    Args:
        key: Their name there, and the beginning of their names in the record.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return them as rows of the table of digests, null on workers that have none."""
        if not any(messages.named):
            return {}
        sent_W = [names.get(self._key, {}) for names in messages.named]
        found = []
        for kind in dict.fromkeys(kind for sent in sent_W for kind in sent):
            values_W = [sent.get(kind, {}) for sent in sent_W]
            for name in dict.fromkeys(name for values in values_W for name in values):
                held_W = np.array([values.get(name, MISSING_INT) for values in values_W], np.int64)
                full_name = f"{self._key}: {name}"
                found.append(
                    StateDifference(StateKind(kind), full_name, held_W, np.zeros(len(held_W), bool))
                )
        return {"differences": tuple(found)}


def held_values(rows: Iterable[StateDifference], kind: StateKind, key: str) -> dict[str, Ints]:
    """Return the values ``[W]`` of one kind that :class:`HeldValues` has recorded, by name."""
    prefix = f"{key}: "
    return {
        row.name.removeprefix(prefix): row.digests_W
        for row in rows
        if row.kind is kind and row.name.startswith(prefix)
    }


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


def fill(columns: Columns, ranks: Ints, values: Mapping[str, Floats]) -> None:
    """Put some workers' values into their columns; NaN is missing."""
    for name, given in values.items():
        column = columns[name]
        missing = MISSING_INT if column.dtype == np.int64 else np.nan
        column[ranks] = np.where(np.isnan(given), missing, given)
