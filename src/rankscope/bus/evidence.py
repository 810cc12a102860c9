"""The declaration of one kind of evidence: the one place from which wire, record and report follow.

A kind of evidence is a package with up to five parts, each found by its name:

- its declaration, in ``__init__``: columns of the record and arrays of a step's message;
- ``probe.py`` measures it in the training process (torch): ``make_probe(job)`` returns one,
  several or None; ``why_not`` says why a training does not allow it, ``make_recorder`` records one
  without a session;
- ``judge.py`` works at the root, on the steps of all workers (numpy): ``make_combiner(layout)``,
  ``amend`` and ``derive`` turn messages into a step, and may stand in ``combine.py``;
  ``make_judges(run)`` finds faults in steps, ``make_checks(run)`` lists what they look for,
  ``next_command`` is one to run after a finding;
- ``director.py`` works at the root, too: ``make_director(run)`` gets messages that its probes send
  beside their steps, sends requests to them, and publishes findings of its own;
- ``findings.toml``: titles, explanations, next checks, and the text of the page of causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np


class Table(StrEnum):
    """The tables of a run directory, one folder of Parquet files each."""

    STEPS = "steps"
    WORKERS = "workers"
    MICRO = "micro"
    SAMPLES = "samples"
    PAIRS = "pairs"
    GROUPS = "groups"
    DIGESTS = "digests"
    TRACES = "traces"


class DType(StrEnum):
    """The types that a column can have."""

    INT = "int64"
    FLOAT = "float64"
    BOOL = "bool"
    TEXT = "string"
    INTS = "list<int64>"
    FLOATS = "list<float32>"


class Source(StrEnum):
    """Where a value comes from, and so how it is gathered."""

    KEY = "key"
    """Names the row: step, rank, micro-batch."""
    LOCAL = "local"
    """Known of each worker by itself: measured there, or computed from its message."""
    SEQUENCE = "sequence"
    """The same, of variable length."""
    DERIVED = "derived"
    """Computed from the values of all workers."""


class Tail(StrEnum):
    """Which direction of a value is suspicious in a worker that differs from the others.

    Sinks show columns of any tail but ``NONE``.
    """

    NONE = "none"
    LOW = "low"
    HIGH = "high"
    BOTH = "both"


class Compares(StrEnum):
    """Which search compares the workers in a column."""

    RESULTS = "results"
    """A worker's results: loss, gradient."""
    AMOUNTS = "amounts"
    """Its amount of data."""
    ROLLOUTS = "rollouts"
    """The engine that draws its completions."""


class Compared(NamedTuple):
    """How detectors compare the workers in a column."""

    label: str  # its name in findings
    # whether a deviation is reported as a part of the median where all values are positive; else
    # always as an absolute difference
    relative: bool = True
    observed: bool = True  # whether only steps whose gradients were measured have it
    by: Compares = Compares.RESULTS  # which search compares them


@dataclass(frozen=True, slots=True)
class Column:
    """The declaration of one column."""

    name: str  # column name, stable across releases of one schema version
    table: Table
    dtype: DType  # its type. Undefined values are null, never a silent 0 or NaN
    unit: str  # unit of the value; empty for dimensionless ones
    meaning: str  # one line in plain words, shown in docs and reports
    source: Source  # where the value comes from
    tail: Tail = Tail.NONE  # which direction is suspicious
    # how detectors look for workers that differ in it; None where they do not
    compared: Compared | None = None
    bits: tuple[str, ...] = ()  # names of the bits of a sum of flags, from the lowest

    def bit_names(self, value: int) -> str:
        """Return the names of the bits that are set, separated by commas; empty for none."""
        return ", ".join(name for place, name in enumerate(self.bits) if value >> place & 1)

    @property
    def is_quantity(self) -> bool:
        """Whether a mean over steps is of use: an amount, not a name, a digest or a flag."""
        counted = self.dtype is DType.INT and bool(self.unit)
        return self.source is not Source.KEY and (self.dtype is DType.FLOAT or counted)


def declare(table: Table, *rows: tuple[Any, ...]) -> tuple[Column, ...]:
    """Return columns from rows: name, type, unit, source, tail, meaning; if any, compared, bits."""
    return tuple(
        Column(name, table, dtype, unit, meaning, source, tail, *compared)
        for name, dtype, unit, source, tail, meaning, *compared in rows
    )


# fmt: off
_STEP = ("step", DType.INT, "", Source.KEY, Tail.NONE, "as in steps")
_RANK = ("rank", DType.INT, "", Source.KEY, Tail.NONE, "as in workers")
KEYS = (
    *declare(
        Table.STEPS,
        ("step", DType.INT, "", Source.KEY, Tail.NONE, "backward passes that synchronised gradients, from 0"),
        ("time", DType.FLOAT, "s", Source.KEY, Tail.NONE, "Unix time at which rank 0 gathered the step"),
        ("observed", DType.BOOL, "", Source.KEY, Tail.NONE, "whether gradients were measured in this step"),
        ("interval", DType.INT, "steps", Source.DERIVED, Tail.NONE, "gradients are measured in steps that are multiples of this"),
    ),
    *declare(
        Table.WORKERS,
        _STEP,
        ("rank", DType.INT, "", Source.KEY, Tail.NONE, "rank of the worker in its data-parallel group"),
    ),
    *declare(
        Table.MICRO,
        _STEP,
        _RANK,
        ("micro", DType.INT, "", Source.KEY, Tail.NONE, "micro-batch inside the step, from 0"),
    ),
    *declare(Table.SAMPLES, _STEP, _RANK),
    *declare(Table.PAIRS, _STEP),
    *declare(
        Table.GROUPS,
        _STEP,
        _RANK,
        ("group", DType.TEXT, "", Source.KEY, Tail.NONE, "group of parameters: a transformer block, the embedding, the head"),
    ),
    *declare(
        Table.DIGESTS,
        _STEP,
        _RANK,
        ("kind", DType.TEXT, "", Source.KEY, Tail.NONE, "parameter, buffer, optimizer, reduced or applied (gradient), or another kind of state; started, saved, rounded, constant, exchanged and follows are what each worker holds, updates or gets"),
        ("name", DType.TEXT, "", Source.KEY, Tail.NONE, "name of the compared state in the model; of the kinds of a model's state, only differences between workers are recorded"),
    ),
    *declare(
        Table.TRACES,
        ("step", DType.INT, "", Source.KEY, Tail.NONE, "as in steps; the rows of the step before the first hold the initial state"),
        ("kind", DType.TEXT, "", Source.KEY, Tail.NONE, "parameter (after the step) or reduced (gradient, right after the reduction), on rank 0; at the beginning also buffer and optimizer"),
        ("name", DType.TEXT, "", Source.KEY, Tail.NONE, "the parameter's name in the model"),
    ),
)
# fmt: on
"""The columns that name a row, which no kind of evidence owns."""


_AT_ROOT = ("judge", "combine", "director")


class Array(NamedTuple):
    """A named array of one worker and step, of any length: ids, losses, sketches."""

    name: str  # name in messages; its last letter names its axis
    dtype: type[np.generic]  # type of its elements
    bulk: bool = False  # whether it is left out while the agent does not keep up


@dataclass(frozen=True, slots=True)
class Evidence:
    """One kind of evidence."""

    name: str
    package: str
    columns: tuple[Column, ...] = ()
    # arrays that a worker sends in a step's message, besides LOCAL columns
    arrays: tuple[Array, ...] = ()
    # integers that a worker sends by this name in a few steps: rows of the table of digests
    held: str = ""

    def make_probes(self, job: Any) -> Sequence[Any]:
        """Return its probes in a training process; the first one gets requests of the root."""
        make = self._find("probe", "make_probe")
        made = None if make is None else make(job)
        if made is None:
            return ()
        return made if isinstance(made, tuple) else (made,)

    def why_not(self, wrapped: Any, options: Any, *, alike: bool) -> str:
        """Return why it does not measure in a training; empty if it does.

        ``alike``: all workers hold the same parameters. UsageError or UnsupportedError where the
        options ask for what the training does not allow.
        """
        check = self._find("probe", "why_not")
        return "" if check is None else str(check(wrapped, options, alike=alike))

    def make_recorder(self, model: Any, **given: Any) -> Any:
        """Return what records a training without a session; None where it records none."""
        make = self._find("probe", "make_recorder")
        return None if make is None else make(model, **given)

    def at_root(self, name: str) -> Any:
        """Return what it has by a name for the root: ``make_judges``, ``derive``; None without."""
        found = (self._find(module, name) for module in _AT_ROOT)
        return next((each for each in found if each is not None), None)

    def _find(self, module: str, name: str) -> Any:
        path = f"{self.package}.{module}"
        return None if find_spec(path) is None else getattr(import_module(path), name, None)

    @property
    def findings(self) -> str:
        """Its findings as TOML; empty where it has none."""
        place = files(self.package).joinpath("findings.toml")
        return place.read_text("utf-8") if place.is_file() else ""
