"""The messages of all workers, and how a kind of evidence turns them into a step at the root.

Legend of shapes: W workers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.stats.arrays import MISSING_INT, Bools, Floats, Ints, Ragged


@dataclass(frozen=True, slots=True)
class Layout:
    """How to read the workers' messages."""

    num_workers: int
    groups: tuple[str, ...] = ()  # names of the parameter groups
    section_counts: tuple[int, ...] = ()  # how many sections each group has; empty without an audit
    sketch_width: int = 0  # numbers in the sketch of the local gradient; 0 without sketches
    group_width: int = 0  # numbers in the sketch of each group; 0 without
    audit_width: int = 0  # numbers in the sketch of a section; 0 without an audit
    reduced_copies: int = 1  # how many workers hold each element of the reduced gradient
    # whether the training's own loop reduces: to a mean, a sum, or not at all
    by_loop: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Layout":
        """Read what :meth:`to_json` returned."""
        lists = {"groups", "section_counts"}
        values: dict[str, Any] = {n: tuple(v) if n in lists else v for n, v in given.items()}
        return cls(**values)


@dataclass(frozen=True)
class Messages:
    """One step of several workers."""

    step: int
    times_W: Floats  # Unix time in seconds at which each worker's step ended
    items_W: Ints  # digest of kinds and names of each worker's compared state
    arrays: Mapping[str, Ragged]  # all workers' arrays, by the names that evidence declares

    def __len__(self) -> int:
        return len(self.items_W)

    def __getitem__(self, name: str) -> Ragged:
        return self.arrays[name]

    @property
    def measured(self) -> Bools:
        """Which workers' messages hold a gradient ``[W]``."""
        return np.asarray(self["numbers"].lengths_R > 0)

    @cached_property
    def named(self) -> tuple[dict[str, Any], ...]:
        """What each worker has sent by name ``[W]``, empty in most steps; equal ones are shared."""
        packed = self["names"]
        if not len(packed.flat):
            return ({},) * len(self)
        known: dict[bytes, dict[str, Any]] = {b"": {}}
        found = []
        for row in packed.rows:
            text = row.tobytes()
            if text not in known:
                known[text] = json.loads(text)
            found.append(known[text])
        return tuple(found)


Columns = Mapping[str, NDArray[Any]]
"""The workers' LOCAL columns ``[W]`` by name, to be filled in place."""


class Combiner:
    """Turns the messages of all workers into their common step."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def learn(self, rank: int, message: Any) -> None:
        """Process a message on arrival, before its step is complete; arrays are its attributes."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in columns of the workers; return fields of ``GatheredStep``."""
        return {}


class HeldValues(Combiner):
    """Records integers that workers send in a few steps, such as digests of what they hold.

    A message has them among its names, by kind of state and by name.

    ``key`` is their name there, and the beginning of their names in the record.
    """

    def __init__(self, layout: Layout, key: str) -> None:
        super().__init__(layout)
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

    It has ``derive(gathered) -> Derived``. Gradient columns are NaN in a step that
    was not observed, sample columns where no worker named its samples.
    """

    steps: Mapping[str, float] = field(default_factory=dict)  # DERIVED columns of the steps table
    # DERIVED columns of the workers table ``[W]``
    workers: Mapping[str, Floats] = field(default_factory=dict)
    # other fields of ``rankscope.bus.step.StepReport``
    report: Mapping[str, Any] = field(default_factory=dict)


def fill(columns: Columns, ranks: Ints, values: Mapping[str, Floats]) -> None:
    """Put some workers' values into their columns; NaN is missing."""
    for name, given in values.items():
        column = columns[name]
        missing = MISSING_INT if column.dtype == np.int64 else np.nan
        column[ranks] = np.where(np.isnan(given), missing, given)
