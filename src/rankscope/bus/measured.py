"""The gradient part of a step message: two flat vectors and their sizes."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from rankscope.bus.step import MeasuredGradient
from rankscope.stats.arrays import Floats, Floats32, Ints
from rankscope.stats.audit import AuditPart

_Flat = TypeVar("_Flat", Floats, Floats32)

_ALIKE = 1e-4
"""Changes of one kind differ by less."""

NUMBERS = (
    "squares",
    "reduced_squares",
    "micro",
    "largest",
    "nonfinite",
    "carried",
    "product",
    "kept",
)
"""The parts of ``numbers``, in order; one that is absent has the size 0."""

SKETCHES = ("total", "groups", "local", "reduced")
"""The parts of ``sketches``, in order; groups that have one section each need none of their own."""


class Measured(NamedTuple):
    """The gradient part of a worker's message, unpacked.

    Attributes:
        gradient: The values that are compared with other workers.
        values: LOCAL signals.
        micro_norms: Gradient norms of the micro-batches ``[M]``, empty when unknown.
        changes_G: Relative change of each group's accumulated gradient between two micro-batches,
            the largest of the step; NaN where the worker holds nothing of it; empty when unknown.
        found_B: Norms of the accumulated gradient at the beginning of each backward pass after
            the step's first; empty when unknown.
    """

    gradient: MeasuredGradient
    values: dict[str, float]
    micro_norms: Floats
    changes_G: Floats
    found_B: Floats


def sizes_of(
    numbers: Mapping[str, int], sketches: Mapping[str, int], *, norm_estimated: bool
) -> list[int]:
    """Return the sizes of all parts, and whether the norm is an estimate, for the message."""
    sizes = [numbers.get(name, 0) for name in NUMBERS]
    return [*sizes, *(sketches.get(name, 0) for name in SKETCHES), int(norm_estimated)]


def measured_of(
    numbers: Floats, sketches: Floats32, sizes: Ints, section_counts: Sequence[int]
) -> Measured:
    """Unpack the gradient part of a step message.

    Args:
        numbers: Float64 parts, one after the other, see ``NUMBERS``.
        sketches: Float32 parts, see ``SKETCHES``.
        sizes: As :func:`sizes_of` has them.
        section_counts: How many sections each group has; empty where groups are whole.
    """
    given = [int(size) for size in sizes]
    part = _parts(numbers, NUMBERS, given)
    sketch = _parts(sketches, SKETCHES, given[len(NUMBERS) :])
    squares_R = part["squares"]
    num_rows = len(part["squares"])
    counts = tuple(section_counts) or (1,) * num_rows
    firsts_G = np.cumsum((0, *counts[:-1]))
    reduced_squares_R = part["reduced_squares"]
    if not len(reduced_squares_R):
        reduced_squares_R = np.full(num_rows, np.nan)
    audit = None
    groups_GK = sketch["groups"].reshape(len(firsts_G), -1)
    if len(sketch["local"]):
        local_SK = sketch["local"].reshape(num_rows, -1)
        reduced = sketch["reduced"]
        reduced_SK = (
            reduced.reshape(local_SK.shape) if len(reduced) else np.full_like(local_SK, np.nan)
        )
        audit = AuditPart(local_SK, reduced_SK, reduced_squares_R)
        if not groups_GK.size and len(counts) == num_rows:
            groups_GK = local_SK
    gradient = MeasuredGradient(
        group_norms_G=np.sqrt(np.add.reduceat(squares_R, firsts_G)),
        sketch_K=sketch["total"],
        group_sketches_GK=groups_GK,
        audit=audit,
        reduced_product=float(part["product"][0]) if len(part["product"]) else math.nan,
    )
    values = {
        "grad_norm": math.sqrt(squares_R.sum()),
        "grad_norm_estimated": float(given[-1]),
        "grad_max": float(part["largest"][0]),
        "grad_nonfinite": float(part["nonfinite"][0]),
        "reduced_norm": math.sqrt(reduced_squares_R.sum()),
        "grad_carried_over": float(part["carried"][0]) if len(part["carried"]) else 0.0,
    }
    kept = part["kept"]
    num_groups = len(counts)
    squares_B2 = kept[:-num_groups].reshape(-1, 2) if len(kept) else np.empty((0, 2))
    if len(kept):
        values |= accumulator_values(squares_B2)
    changes_G = kept[len(kept) - num_groups :]
    return Measured(gradient, values, np.sqrt(part["micro"]), changes_G, np.sqrt(squares_B2[:, 1]))


def accumulator_values(squares_B2: Floats) -> dict[str, float]:
    """Return the signals of a gradient's change between two micro-batches.

    Args:
        squares_B2: Squared norms at the end of a backward pass and at the beginning of the next,
            for each pair of consecutive passes.

    Example:
        >>> accumulator_values(np.array([[4.0, 4.0], [9.0, 36.0]]))  # doubled before the third
        {'accumulator_change': 0.5, 'accumulator_scale': 2.0, 'accumulator_micro': 2.0}
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left_B, found_B = np.sqrt(squares_B2).T
        change_B = np.nan_to_num(np.abs(found_B - left_B) / np.maximum(left_B, found_B))
        scale_B = found_B / left_B
    worst = int((change_B >= (1 - _ALIKE) * change_B.max()).argmax())  # the first of equals
    return {
        "accumulator_change": float(change_B[worst]),
        "accumulator_scale": float(scale_B[worst]),
        "accumulator_micro": float(worst + 1),
    }


def _parts(flat: _Flat, names: Sequence[str], sizes: Sequence[int]) -> dict[str, _Flat]:
    parts: dict[str, _Flat] = {}
    at = 0
    for name, size in zip(names, sizes, strict=False):
        parts[name] = flat[at : at + size]
        at += size
    return parts
