"""The workers' gradients, from their messages.

Legend of shapes: W workers, R rows of an audit, G groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.bus.measured import Found, audit_of, by_rank, measured_in
from rankscope.bus.messages import Columns, Combiner, Layout, Messages, fill
from rankscope.bus.step import MISSING_INT
from rankscope.evidence.gradient.user_reduction import normalise_user_reduction, reduced_between
from rankscope.stats.arrays import Floats
from rankscope.stats.audit import AuditPart, residuals_of_all


class MeasuredGradients(Combiner):
    """Gradients of all workers; a step is observed if each has measured its own.

    Args:
        layout: How to read the messages.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Fill in norms and other columns; return the values compared between workers."""
        found = measured_in(messages, self._layout.section_counts)
        is_whole = bool(messages.measured.all())
        if self._layout.by_loop:
            columns["summed_workers"][:] = np.nan  # until it is known
        if self._layout.by_loop and is_whole:
            found = _as_reduced(found)
        norms_W: list[Floats] = [np.empty(0)] * len(messages)
        for ranks, one in found:
            carried = one.values["grad_carried_over"] > 0
            is_whole &= not carried.any()
            fill(columns, ranks[carried], {"grad_carried_over": np.ones(carried.sum())})
            own = ranks[~carried]
            fill(columns, own, {name: value[~carried] for name, value in one.values.items()})
            for rank, norms in zip(own.tolist(), one.micro_norms_wM[~carried], strict=True):
                norms_W[rank] = norms
        _fill_nonfinite(columns)
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
            "reduced_products_W": by_rank(found, "products_w") if layout.num_products else None,
        }

    def _residuals(self, parts_W: Sequence[AuditPart]) -> Floats:
        firsts = np.cumsum((0, *self._layout.section_counts[:-1])).astype(np.int64)
        return residuals_of_all(parts_W, firsts, self._layout.reduced_copies)


def make_combiner(layout: Layout) -> MeasuredGradients:
    """Return the combiner of gradients."""
    return MeasuredGradients(layout)


def _as_reduced(found: Found) -> Found:
    """Replace a loop's own reduced gradients by the mean that they are a multiple of.

    A loop that reduces after each micro-batch adds to reduced gradients: none is local then.
    """
    norms_W = [norms_B for _, one in found for norms_B in one.found_wB]
    if reduced_between(norms_W):
        return [
            (ranks, one._replace(values={**one.values, "grad_carried_over": np.ones(len(ranks))}))
            for ranks, one in found
        ]
    parts_W = audit_of(found)
    if len(parts_W) < len(norms_W):
        return found
    normalised = normalise_user_reduction(parts_W)
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


def _fill_nonfinite(columns: Columns) -> None:
    counts_W = columns["grad_nonfinite"]
    columns["nonfinite"][:] |= (counts_W != MISSING_INT) & (counts_W > 0)
