"""Parameters that one group of ranks reduces together, and whether two groups hold the same model.

A group that reduces only among its own ranks sees nothing of another group with the same model. So
each group's first rank publishes a few elements of its parameters, from step to step. Two groups
that begin with equal elements and apply different updates train two models.

Groups that draw the same batches share the work on each sample, as tensor-parallel ranks do: they
hold other parts of some parameters, and replicas of the rest, which must stay equal.

Legend of shapes: E elements; P parameters, of each of which the same number of elements is read.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats
from rankscope.stats.rounding import UNIT_ROUNDOFF

MOST_UNITS = 64
"""Groups of a job that are compared."""

_APART = 1 / 16
"""Distance of two updates, relative to the larger one, that rounding may explain: as of replicas
that compute in bfloat16 by themselves, see :func:`rankscope.stats.rounding.tolerance_of`."""

_REPLICAS_APART = 1 / 64
"""The same for replicas of ranks that share the work on one sample."""

_ROUNDINGS = 4  # of an element in an update
_FEWEST_DISTINCT = 8  # elements that begin with one constant prove nothing
_COARSEST = UNIT_ROUNDOFF["bfloat16"]

ELEMENTS = 4
"""Elements of each parameter that are read."""


@dataclass(slots=True)
class Unit:
    """The parameters that one group of ranks reduces together, as its first rank publishes them.

    An age is the number of steps since the run began.
    """

    ranks: tuple[int, ...]  # of the job, that reduce them
    main: bool  # they are most of their run's; others are reduced over fewer ranks
    layout: int  # digest of their names, shapes and types
    names: tuple[str, ...]  # of the parameters that are read
    dtype: str  # of most of them
    divisor: float  # of the sum of gradients; 0 if unknown
    wrapper: str  # what reduces them, in words
    axes: Mapping[str, tuple[int, ...]]  # ranks of the job along other axes of their mesh
    given_dir: str  # the run directory that the user gave
    seed: int  # of the first rank
    scale: float | None = None  # of the reduced gradient, by the training, relative to the main's
    whole: bool = True  # the first rank runs all of the model, not a stage given activations
    readings: dict[int, str] = field(default_factory=dict)  # by age: float32 ``[E]`` in base64
    settings: dict[int, int] = field(default_factory=dict)  # by age: digest of the optimizer's
    batches: dict[int, int] = field(default_factory=dict)  # by age: digest of the first rank's

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Unit":
        """Return the unit of plain values."""
        unit = cls(**values)
        unit.ranks = tuple(map(int, unit.ranks))
        unit.names = tuple(unit.names)
        unit.axes = {name: tuple(line) for name, line in unit.axes.items()}
        for name in ("readings", "settings", "batches"):
            setattr(unit, name, {int(at): one for at, one in getattr(unit, name).items()})
        return unit

    def elements(self, age: int) -> Floats:
        """Return the elements ``[E]`` so many steps after the run began; empty if unknown."""
        packed = base64.b64decode(self.readings.get(age, ""))
        return np.frombuffer(packed, np.float32).astype(np.float64)


def _have_one_form(one: Unit, other: Unit) -> bool:
    """Return whether two groups without a common rank have equal layouts of whole models."""
    apart = not set(one.ranks) & set(other.ranks)
    return one.layout == other.layout and one.whole and other.whole and apart


def is_same_model(one: Unit, other: Unit) -> bool:
    """Return whether two groups began with one model: equal layout, and equal elements."""
    begins_E = one.elements(0)
    return (
        _have_one_form(one, other)
        and len(np.unique(begins_E)) >= _FEWEST_DISTINCT
        and np.array_equal(begins_E, other.elements(0))
    )


def replicas_apart(one: Unit, other: Unit) -> tuple[int, list[str]] | None:
    """Return since when replicas of two groups that share each sample differ, and their names.

    Parameters that begin with equal values are replicas, unless these are constant; there must be
    others, of which the groups hold parts. All replicas that move have to differ: a part that
    begins with the values of another part may move as it likes.
    """
    drawn = one.batches.keys() & other.batches.keys()
    common = sorted(one.readings.keys() & other.readings.keys() - {0})
    alike = (
        _have_one_form(one, other)
        and drawn
        and all(one.batches[at] == other.batches[at] for at in drawn)
        and all(one.settings.get(at) == other.settings.get(at) for at in common)
    )
    begins_PE, other_PE = one.elements(0), other.elements(0)
    if not alike or not len(begins_PE) or begins_PE.shape != other_PE.shape:
        return None
    begins_PE, other_PE = begins_PE.reshape(-1, ELEMENTS), other_PE.reshape(-1, ELEMENTS)
    equal_P = (begins_PE == other_PE).all(axis=1)
    replicas_P = equal_P & (np.ptp(begins_PE, axis=1) > 0)
    if equal_P.all() or not replicas_P.any():
        return None
    apart = list(takewhile(lambda at: _all_apart(one, other, at, replicas_P), reversed(common)))
    names = [name for name, is_one in zip(one.names, replicas_P, strict=False) if is_one]
    return (apart[-1] - 1, names) if len(apart) > 1 else None


def _all_apart(one: Unit, other: Unit, at: int, chosen_P: NDArray[np.bool_]) -> bool:
    """Return whether all of these parameters that have moved differ between two groups."""
    begins_PE = one.elements(0).reshape(-1, ELEMENTS)[chosen_P]
    moved_PE, other_PE = (
        unit.elements(at).reshape(-1, ELEMENTS)[chosen_P] - begins_PE for unit in (one, other)
    )
    size_P = np.maximum(np.linalg.norm(moved_PE, axis=1), np.linalg.norm(other_PE, axis=1))
    rounding = _ROUNDINGS * at * UNIT_ROUNDOFF.get(one.dtype, _COARSEST)
    allowed_P = _REPLICAS_APART * size_P + rounding * np.linalg.norm(begins_PE, axis=1)
    distance_P = np.linalg.norm(moved_PE - other_PE, axis=1)
    moved_P = size_P > 0
    return bool(moved_P.any() and (distance_P > allowed_P)[moved_P].all())


def first_apart(one: Unit, other: Unit) -> int | None:
    """Return the first step whose updates differ, and after which the groups never agree again.

    None while fewer than two readings show it, where the optimizer's settings differ, and where
    both first ranks draw the same batches: those share the work on each sample.
    """
    common = sorted(one.readings.keys() & other.readings.keys() - {0})
    drawn = one.batches.keys() & other.batches.keys()
    if not drawn or all(one.batches[at] == other.batches[at] for at in drawn):
        return None
    if any(one.settings.get(at) != other.settings.get(at) for at in common):
        return None
    apart = list(takewhile(lambda at: _are_apart(one, other, at), reversed(common)))
    return apart[-1] - 1 if len(apart) > 1 else None


def _are_apart(one: Unit, other: Unit, at: int) -> bool:
    begins_E = one.elements(0)
    moved_E = one.elements(at) - begins_E
    other_E = other.elements(at) - begins_E
    largest = max(np.linalg.norm(moved_E), np.linalg.norm(other_E))
    rounding = _ROUNDINGS * at * UNIT_ROUNDOFF.get(one.dtype, _COARSEST)
    allowed = _APART * largest + rounding * np.linalg.norm(begins_E)
    distance = np.linalg.norm(moved_E - other_E)
    return bool(np.isfinite(distance) and distance > allowed)
