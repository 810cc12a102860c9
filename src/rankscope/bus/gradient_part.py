"""The part of a step's messages that holds gradients: the sizes of its arrays, and what they mean.

Legend of shapes: w workers of the same sizes, G groups, R rows of them, B pairs of backward passes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.messages import Messages
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
    "kept",
)
"""The parts of ``numbers``, in order; one that is absent has the size 0."""

SKETCHES = ("total", "groups", "local", "reduced")
"""The parts of ``sketches``, in order; groups that have one section each need none of their own."""


class UnpackedGradients(NamedTuple):
    """The gradient parts of messages with the same sizes, unpacked. w workers."""

    values: dict[str, Floats]  # LOCAL signals ``[w]``
    group_norms_wG: Floats  # L2 norm of each group's local gradient
    sketches_wK: Floats32  # sketches of the local gradients; empty in the tier without sketches
    group_sketches_wGK: Floats32  # narrow sketches of each group's local gradient, or ``[w, G, 0]``
    audit_w: Sequence[AuditPart]  # their contributions to the audit of the reduction; empty without
    micro_norms_wM: Floats  # gradient norms of the micro-batches, empty when unknown
    # relative change of each group's accumulated gradient between two micro-batches, the largest of
    # the step; NaN where the worker holds nothing of it; empty when unknown
    changes_wG: Floats
    # norms of the accumulated gradient at the beginning of each backward pass after the step's
    # first; empty when unknown
    found_wB: Floats


Found = Sequence[tuple[Ints, UnpackedGradients]]
"""Ranks whose messages have the same sizes, and what they have measured."""


def sizes_of(
    numbers: Mapping[str, int], sketches: Mapping[str, int], *, norm_estimated: bool
) -> list[int]:
    """Return the sizes of all parts, and whether the norm is an estimate, for the message."""
    sizes = [numbers.get(name, 0) for name in NUMBERS]
    return [*sizes, *(sketches.get(name, 0) for name in SKETCHES), int(norm_estimated)]


def measured_of(
    numbers_wN: Floats, sketches_wN: Floats32, sizes: Ints, section_counts: Sequence[int]
) -> UnpackedGradients:
    """Unpack the gradient parts of step messages.

    ``numbers_wN`` and ``sketches_wN`` hold the parts of ``NUMBERS`` and ``SKETCHES``, one after the
    other, of sizes that are the same for all. ``section_counts`` is empty where groups are whole.
    """
    given = [int(size) for size in sizes]
    width = len(numbers_wN)
    part = _parts(numbers_wN, NUMBERS, given)
    sketch = _parts(sketches_wN, SKETCHES, given[len(NUMBERS) :])
    squares_wR = part["squares"]
    num_rows = given[0]
    counts = tuple(section_counts) or (1,) * num_rows
    num_groups = len(counts)
    reduced_squares_wR = part["reduced_squares"]
    if not reduced_squares_wR.size:
        reduced_squares_wR = np.full((width, num_rows), np.nan)
    audit: list[AuditPart] = []
    groups_wGK = sketch["groups"].reshape(width, num_groups, -1)
    if sketch["local"].size:
        local_wSK = sketch["local"].reshape(width, num_rows, -1)
        reduced_wSK = sketch["reduced"].reshape(width, num_rows, -1)
        if not reduced_wSK.size:
            reduced_wSK = np.full_like(local_wSK, np.nan)
        audit = list(map(AuditPart, local_wSK, reduced_wSK, reduced_squares_wR))
        if not groups_wGK.size and num_groups == num_rows:
            groups_wGK = local_wSK
    carried = part["carried"]
    values = {
        "grad_norm": np.sqrt(squares_wR.sum(axis=1)),
        "grad_norm_estimated": np.full(width, float(given[-1])),
        "grad_max": part["largest"][:, 0],
        "grad_nonfinite": part["nonfinite"][:, 0],
        "reduced_norm": np.sqrt(reduced_squares_wR.sum(axis=1)),
        "grad_carried_over": carried[:, 0] if carried.size else np.zeros(width),
    }
    kept = part["kept"]
    num_squares = max(kept.shape[1] - num_groups, 0)
    squares_wB2 = kept[:, :num_squares].reshape(width, -1, 2)
    if kept.size:
        values |= accumulator_values(squares_wB2)
    firsts_G = np.cumsum((0, *counts[:-1]))
    return UnpackedGradients(
        values=values,
        group_norms_wG=np.sqrt(np.add.reduceat(squares_wR, firsts_G, axis=1)),
        sketches_wK=sketch["total"],
        group_sketches_wGK=groups_wGK,
        audit_w=audit,
        micro_norms_wM=np.sqrt(part["micro"]),
        changes_wG=kept[:, num_squares:],
        found_wB=np.sqrt(squares_wB2[..., 1]),
    )


def measured_in(messages: Messages, section_counts: Sequence[int]) -> Found:
    """Return what all workers have measured whose messages hold a gradient."""
    ranks = np.flatnonzero(messages.measured)
    sizes_w = messages["sizes"].take(ranks).rows
    alike: dict[bytes, list[int]] = {}
    for rank, sizes in zip(ranks.tolist(), sizes_w, strict=True):
        alike.setdefault(sizes.tobytes(), []).append(rank)
    found = []
    for content, members in alike.items():
        chosen = np.array(members)
        numbers, sketches = (messages[name].take(chosen) for name in ("numbers", "sketches"))
        given = np.frombuffer(content, np.int64)
        one = measured_of(numbers.matrix, sketches.matrix, given, section_counts)
        found.append((chosen, one))
    return found


def by_rank(found: Found, name: str) -> NDArray[Any]:
    """Return an array of all workers, in the order of their ranks."""
    if len(found) == 1:
        given: NDArray[Any] = getattr(found[0][1], name)
        return given
    joined = np.concatenate([getattr(one, name) for _, one in found])
    return joined[np.argsort(np.concatenate([ranks for ranks, _ in found]))]


def audit_of(found: Found) -> list[AuditPart]:
    """Return the parts of all workers in the audit that have one, in the order of their ranks."""
    parts: dict[int, AuditPart] = {}
    for ranks, one in found:
        parts |= dict(zip(ranks.tolist(), one.audit_w, strict=False))  # none, or all of them
    return [parts[rank] for rank in sorted(parts)]


def accumulator_values(squares_wB2: Floats) -> dict[str, Floats]:
    """Return the signals of a gradient's change between two micro-batches ``[w]``.

    ``squares_wB2`` holds squared norms at the end of a backward pass and at the beginning of the
    next, for each pair of consecutive passes.

    Example:
        >>> found = accumulator_values(np.array([[[4.0, 4.0], [9.0, 36.0]]]))
        >>> {name: value.tolist() for name, value in found.items()}  # doubled before the third
        {'accumulator_change': [0.5], 'accumulator_scale': [2.0], 'accumulator_micro': [2.0]}
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left_wB, found_wB = np.moveaxis(np.sqrt(squares_wB2), 2, 0)
        change_wB = np.nan_to_num(np.abs(found_wB - left_wB) / np.maximum(left_wB, found_wB))
        scale_wB = found_wB / left_wB
    least_w1 = (1 - _ALIKE) * change_wB.max(axis=1, keepdims=True)
    worst_w = (change_wB >= least_w1).argmax(axis=1)  # the first of equals
    each_w = np.arange(len(worst_w))
    return {
        "accumulator_change": change_wB[each_w, worst_w],
        "accumulator_scale": scale_wB[each_w, worst_w],
        "accumulator_micro": worst_w + 1.0,
    }


def _parts(flat_wN: _Flat, names: Sequence[str], sizes: Sequence[int]) -> dict[str, _Flat]:
    parts: dict[str, _Flat] = {}
    at = 0
    for name, size in zip(names, sizes, strict=False):
        parts[name] = flat_wN[:, at : at + size]
        at += size
    return parts
