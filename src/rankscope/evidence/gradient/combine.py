"""The workers' gradients, from their messages.

Where the training's own code reduces, sketches show the result. The optimizer gets the mean of the
local gradients, or their sum, with a gradient scaler's factor undone, or clipped: that is the mean
times one factor, the same for all parameters and on all workers. The factor is undone here, so that
the rest can be audited. Whether it is intended, only a plan or a reference step shows.

Or the optimizer gets each worker's own gradient, whole or of some parameters: then the optimizer
reduces, or nobody does, and nothing is known of a reduction. The parameters show which.

Legend of shapes: W workers, R rows of an audit, G groups, S sections, k numbers in a section's
sketch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rankscope.bus.gradient_part import Found, audit_of, by_rank, measured_in
from rankscope.bus.messages import Columns, Combiner, Messages, fill
from rankscope.bus.replicas import follow_places
from rankscope.stats.arrays import MISSING_INT, Bools, Floats
from rankscope.stats.audit import AuditPart, residuals_of_all

_SAME = 1e-5
"""Relative distance of two sketches of one gradient, which rounding of a factor explains."""

_OWN_FACTOR = 1e-3
"""Relative spread of a section's factor around that of most, inside which it counts."""

_MOST_WEIGHTED = 64  # workers; a sum of more explains a sketch by chance
_ONE_DIRECTION = 0.5
"""Largest relative distance from the mean at which a factor is undone."""


@dataclass(frozen=True, slots=True)
class UserReduction:
    """The result of a reduction by the training's own code."""

    # the workers' parts, the factor undone; the reduced gradient is NaN where it cannot be read
    parts_W: tuple[AuditPart, ...]
    # the reduced gradient over the mean of the local ones; NaN where it is no multiple of it, or
    # unknown
    factor: float
    # whether a worker's reduced gradient is its own local one, up to a factor
    unreduced_W: Bools


def normalise_user_reduction(
    parts_W: Sequence[AuditPart], *, in_shares: bool = False
) -> UserReduction:
    """Return the result of a reduction, as a mean where it is a multiple of the mean.

    ``in_shares``: each worker has a share of the reduced gradient, and their sum is all of it.

    Example:
        >>> local = [np.array([[3.0, 1.0]], np.float32), np.array([[1.0, 3.0]], np.float32)]
        >>> total, square = local[0] + local[1], np.array([32.0])
        >>> found = normalise_user_reduction([AuditPart(each, total, square) for each in local])
        >>> found.factor, found.parts_W[0].reduced_SK.tolist(), found.unreduced_W.tolist()
        (2.0, [[2.0, 2.0]], [False, False])
        >>> own = [AuditPart(each, each, np.array([10.0])) for each in local]
        >>> normalise_user_reduction(own).unreduced_W.tolist()
        [True, True]
    """
    local_WSK = np.stack([part.local_SK.astype(np.float64) for part in parts_W])
    given_WSK = np.stack([part.reduced_SK.astype(np.float64) for part in parts_W])
    none_W = np.zeros(len(parts_W), bool)
    if not (np.isfinite(local_WSK).all() and np.isfinite(given_WSK).all()):
        return UserReduction(tuple(parts_W), float("nan"), none_W)
    if in_shares:
        return _shares(parts_W, local_WSK.mean(axis=0), given_WSK.sum(axis=0))
    placed_S = _by_place(given_WSK)
    if placed_S.any() and not placed_S.all():
        rest = normalise_user_reduction([_sections(part, ~placed_S) for part in parts_W])
        pairs = zip(parts_W, rest.parts_W, strict=True)
        return replace(rest, parts_W=tuple(_filled(*pair, ~placed_S) for pair in pairs))
    mean_SK = local_WSK.mean(axis=0)
    own_WS = _apart(local_WSK, mean_SK[None]) > _SAME  # else the mean is no other than the own
    kept_WS = own_WS & (_apart(given_WSK, local_WSK) <= _SAME)
    # the factors that bring each worker's local gradient nearest to its reduced one
    products_W = (given_WSK * local_WSK).sum(axis=(1, 2))
    squares_W = np.square(local_WSK).sum(axis=(1, 2))
    factors_W = products_W / np.where(squares_W > 0, squares_W, 1.0)
    scaled_WSK = factors_W[:, None, None] * local_WSK
    unreduced_WS = own_WS & (kept_WS | (_apart(given_WSK, scaled_WSK) <= _SAME))
    all_WS = unreduced_WS | ~own_WS
    unreduced_W: Bools = np.logical_and(own_WS.any(axis=1), all_WS.all(axis=1))
    if kept_WS.any() or unreduced_W.any():
        hidden = [_hidden(part) for part in parts_W]
        return UserReduction(tuple(hidden), float("nan"), unreduced_W)
    factor = _plain(_common_factor(given_WSK[0], mean_SK), len(parts_W))
    distance = np.linalg.norm(given_WSK[0] - factor * mean_SK)
    if not factor or not distance <= _ONE_DIRECTION * np.linalg.norm(given_WSK[0]):
        weighted = _is_weighted_sum(given_WSK[0], local_WSK)
        kept_W = parts_W if weighted else [_hidden(part, norms=False) for part in parts_W]
        return UserReduction(tuple(kept_W), float("nan"), none_W)
    return UserReduction(tuple(_undone(part, factor) for part in parts_W), factor, none_W)


def _shares(parts_W: Sequence[AuditPart], mean_SK: Floats, total_SK: Floats) -> UserReduction:
    """Return the result of a reduction of which each worker has a share."""
    none_W = np.zeros(len(parts_W), bool)
    factor = _plain(_common_factor(total_SK, mean_SK), len(parts_W))
    apart_S = _apart(factor * mean_SK[None], total_SK[None])[0] if factor else np.ones(1)
    if 2 * np.count_nonzero(apart_S <= _OWN_FACTOR) <= len(apart_S):  # most are not a multiple
        return UserReduction(tuple(_hidden(part) for part in parts_W), float("nan"), none_W)
    return UserReduction(tuple(_undone(part, factor) for part in parts_W), factor, none_W)


def _undone(part: AuditPart, factor: float) -> AuditPart:
    return replace(
        part,
        reduced_SK=(part.reduced_SK / factor).astype(np.float32),
        reduced_squares_S=part.reduced_squares_S / factor**2,
    )


def _hidden(part: AuditPart, *, norms: bool = True) -> AuditPart:
    """Return a part whose reduced gradient is unknown, and its norms, too."""
    squares_S = part.reduced_squares_S
    return replace(
        part,
        reduced_SK=np.full_like(part.reduced_SK, np.nan),
        reduced_squares_S=np.full_like(squares_S, np.nan) if norms else squares_S,
    )


def _is_weighted_sum(given_SK: Floats, local_WSK: Floats) -> bool:
    """Return whether a gradient is any weighted sum of the workers' own."""
    if len(local_WSK) > _MOST_WEIGHTED:
        return True
    given_N = given_SK.reshape(-1)
    local_NW = local_WSK.reshape(len(local_WSK), -1).T
    weights_W = np.linalg.lstsq(local_NW, given_N, rcond=None)[0]
    far = float(np.linalg.norm(given_N - local_NW @ weights_W))
    return far <= _OWN_FACTOR * float(np.linalg.norm(given_N))


def _by_place(given_WSK: Floats) -> Bools:
    """Return the sections whose reduced gradient follows a rank's place, as of parallel experts."""
    placed_S: Bools = (given_WSK != given_WSK[:1]).any(axis=(0, 2))
    for section in np.flatnonzero(placed_S).tolist():
        placed_S[section] = follow_places([own_K.tobytes() for own_K in given_WSK[:, section]])
    return placed_S


def _sections(part: AuditPart, chosen_S: Bools) -> AuditPart:
    return replace(
        part,
        local_SK=part.local_SK[chosen_S],
        reduced_SK=part.reduced_SK[chosen_S],
        reduced_squares_S=part.reduced_squares_S[chosen_S],
    )


def _filled(part: AuditPart, known: AuditPart, known_S: Bools) -> AuditPart:
    """Return a part with the reduced gradient of some sections, and unknown ones between them."""
    reduced_SK = np.full_like(part.reduced_SK, np.nan)
    squares_S = np.full_like(part.reduced_squares_S, np.nan)
    reduced_SK[known_S] = known.reduced_SK
    squares_S[known_S] = known.reduced_squares_S
    return replace(part, reduced_SK=reduced_SK, reduced_squares_S=squares_S)


def reduced_between(found_W: Sequence[Floats]) -> bool:
    """Return whether workers held equal gradients before they added another micro-batch's.

    ``found_W`` are norms before each later backward pass, of each worker ``[B]``.

    Example:
        >>> reduced_between([np.array([3.0]), np.array([3.0])])
        True
        >>> reduced_between([np.array([3.0]), np.array([2.0])])
        False
    """
    first = found_W[0]
    if len({len(found_B) for found_B in found_W}) > 1 or not (first > 0).any():
        return False
    return all(bool(np.allclose(found_B, first, rtol=_SAME, atol=0.0)) for found_B in found_W)


def _plain(factor: float, num_workers: int) -> float:
    """Return a factor; exactly 1 or W where it is that of a mean or of a sum."""
    known = (float(plain) for plain in (1, num_workers) if abs(factor - plain) <= _SAME * plain)
    return next(known, factor)


def _apart(one_WSK: Floats, other_WSK: Floats) -> Floats:
    """Return distances of sections ``[W, S]``, relative to the first; 0 between zeros."""
    distances_WS = np.linalg.norm(one_WSK - other_WSK, axis=2)
    sizes_WS = np.linalg.norm(one_WSK, axis=2)
    both = np.where(sizes_WS > 0, sizes_WS, np.where(distances_WS > 0, distances_WS, 1.0))
    apart_WS: Floats = distances_WS / both
    return apart_WS


def _common_factor(given_SK: Floats, mean_SK: Floats) -> float:
    """Return the factor of the mean that most sections share; 0 where the mean is zero."""
    products_S = (given_SK * mean_SK).sum(axis=1)
    squares_S = np.square(mean_SK).sum(axis=1)
    known_S = squares_S > 0
    if not known_S.any():
        return 0.0
    ratios_S = products_S[known_S] / squares_S[known_S]
    middle = float(np.median(ratios_S))
    near_S = np.abs(ratios_S - middle) <= _OWN_FACTOR * abs(middle)
    if not near_S.any():
        return middle
    apart_S = _apart(given_SK[known_S][None], (middle * mean_SK[known_S])[None])[0]
    multiple_S = near_S & (apart_S <= _OWN_FACTOR)  # others are near it by chance
    near_S = multiple_S if multiple_S.any() else near_S
    return float(products_S[known_S][near_S].sum() / squares_S[known_S][near_S].sum())


class MeasuredGradients(Combiner):
    """Gradients of all workers; a step is observed if each has measured its own."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in norms and other columns; return the values compared between workers."""
        found = measured_in(messages, self._layout.section_counts)
        is_whole = bool(messages.measured.all())
        if self._layout.by_loop:
            columns["summed_workers"][:] = np.nan  # until it is known
        if self._layout.by_loop and is_whole:
            found = _as_reduced(found, in_shares=self._layout.reduced_copies == 1)
        norms_W: list[Floats] = [np.empty(0)] * len(messages)
        for ranks, one in found:
            carried = one.values["grad_carried_over"] > 0
            is_whole &= not carried.any()
            fill(columns, ranks[carried], {"grad_carried_over": np.ones(carried.sum())})
            own = ranks[~carried]
            fill(columns, own, {name: value[~carried] for name, value in one.values.items()})
            for rank, norms in zip(own.tolist(), one.micro_norms_wM[~carried], strict=True):
                norms_W[rank] = norms
        counts_W = columns["grad_nonfinite"]
        columns["nonfinite"][:] |= (counts_W != MISSING_INT) & (counts_W > 0)
        compared = self._compared(found) if is_whole else {"sketches_WK": None}
        return {"observed": is_whole, "micro_norms": tuple(norms_W), **compared}

    def _compared(self, found: Found) -> dict[str, Any]:
        layout = self._layout
        residuals_WR = self._residuals(audit_of(found)) if layout.section_counts else None
        return {
            "groups": layout.groups,
            "accumulator_changes_WG": _changes(found),
            "group_norms_WG": by_rank(found, "group_norms_wG"),
            "sketches_WK": by_rank(found, "sketches_wK") if layout.sketch_width else None,
            "group_sketches_WGK": (
                by_rank(found, "group_sketches_wGK") if layout.group_width else None
            ),
            "total_residuals_W": None if residuals_WR is None else residuals_WR[:, 0],
            "residuals_WG": None if residuals_WR is None else residuals_WR[:, 1:],
            "reduced_copies": layout.reduced_copies,
        }

    def _residuals(self, parts_W: Sequence[AuditPart]) -> Floats:
        firsts = np.cumsum((0, *self._layout.section_counts[:-1])).astype(np.int64)
        first = parts_W[0].local_SK
        own = all(np.array_equal(part.local_SK, part.reduced_SK) for part in parts_W)
        if own and not all(np.array_equal(part.local_SK, first) for part in parts_W):
            nothing = np.full_like(parts_W[0].reduced_SK, np.nan)
            parts_W = [replace(part, reduced_SK=nothing) for part in parts_W]
        return residuals_of_all(parts_W, firsts, self._layout.reduced_copies)


make_combiner = MeasuredGradients


def _as_reduced(found: Found, *, in_shares: bool) -> Found:
    """Replace a loop's own reduced gradients by the mean; none is local after several of them."""
    norms_W = [norms_B for _, one in found for norms_B in one.found_wB]
    if reduced_between(norms_W):
        return [
            (ranks, one._replace(values={**one.values, "grad_carried_over": np.ones(len(ranks))}))
            for ranks, one in found
        ]
    parts_W = audit_of(found)
    if len(parts_W) < len(norms_W):
        return found
    normalised = normalise_user_reduction(parts_W, in_shares=in_shares)
    squares_WS = np.stack([part.reduced_squares_S for part in normalised.parts_W])
    is_plain = normalised.factor in (1, len(parts_W))  # not clipped, for instance
    summed = normalised.factor if is_plain else np.nan
    return [
        (
            ranks,
            one._replace(
                audit_w=[normalised.parts_W[rank] for rank in ranks],
                values={
                    **one.values,
                    "reduced_norm": np.sqrt(squares_WS[ranks].sum(axis=1)),
                    "summed_workers": np.full(len(ranks), summed),
                    "unreduced": normalised.unreduced_W[ranks].astype(np.float64),
                },
            ),
        )
        for ranks, one in found
    ]


def _changes(found: Found) -> Floats | None:
    """Return changes of accumulated gradients between micro-batches ``[W, G]``, if any."""
    if not all(one.changes_wG.size for _, one in found):
        return None
    changes_WG = by_rank(found, "changes_wG")
    return changes_WG if (changes_WG > 0).any() else None
