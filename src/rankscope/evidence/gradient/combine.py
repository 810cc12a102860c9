"""The workers' gradients, from their messages.

Legend of shapes: W workers, R rows of an audit, G groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.bus.judge import Columns, Combiner, Message, fill
from rankscope.bus.layout import Layout
from rankscope.bus.measured import Measured, measured_of
from rankscope.bus.step import MISSING_INT, MeasuredGradient
from rankscope.evidence.gradient.user_reduction import normalise_user_reduction, reduced_between
from rankscope.stats.arrays import Floats
from rankscope.stats.audit import residuals_of_all


class MeasuredGradients(Combiner):
    """Gradients of all workers; a step is observed if each has measured its own.

    Args:
        layout: How to read the messages.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def combine(self, messages_W: Sequence[Message], columns: Columns) -> Mapping[str, Any]:
        """Fill in norms and other columns; return the values compared between workers."""
        measured_W = [self._measured(message) for message in messages_W]
        if self._layout.by_loop:
            measured_W = _as_reduced(measured_W)
        carried_W = [one is not None and one.values["grad_carried_over"] > 0 for one in measured_W]
        observed = not any(carried_W) and all(one is not None for one in measured_W)
        for rank, one in enumerate(measured_W):
            if one is not None:
                known = {"grad_carried_over": 1.0} if carried_W[rank] else one.values
                fill(columns, rank, known)
        _fill_nonfinite(columns)
        norms_W = tuple(
            np.empty(0) if one is None or carried_W[rank] else one.micro_norms
            for rank, one in enumerate(measured_W)
        )
        found = self._compared(measured_W) if observed else {"sketches_WK": None}
        return {"observed": observed, "micro_norms": norms_W, **found}

    def _measured(self, message: Message) -> Measured | None:
        if not message.measured:
            return None
        counts = self._layout.section_counts
        return measured_of(message.numbers, message.sketches, message.sizes, counts)

    def _compared(self, measured_W: Sequence[Measured | None]) -> dict[str, Any]:
        layout = self._layout
        known = [one for one in measured_W if one is not None]
        known_W = [one.gradient for one in known]
        residuals_WR = self._residuals(known_W) if layout.section_counts else None
        return {
            "groups": layout.groups,
            "accumulator_changes_WG": _changes(known),
            "group_norms_WG": np.stack([one.group_norms_G for one in known_W]),
            "sketches_WK": (
                np.stack([one.sketch_K for one in known_W]) if layout.sketch_width else None
            ),
            "group_sketches_WGK": (
                np.stack([one.group_sketches_GK for one in known_W]) if layout.group_width else None
            ),
            "total_residuals_W": None if residuals_WR is None else residuals_WR[:, 0],
            "residuals_WG": None if residuals_WR is None else residuals_WR[:, 1:],
            "reduced_copies": layout.reduced_copies,
            "reduced_products_W": (
                np.array([one.reduced_product for one in known_W]) if layout.num_products else None
            ),
        }

    def _residuals(self, measured_W: Sequence[MeasuredGradient]) -> Floats:
        parts = [one.audit for one in measured_W if one.audit is not None]
        firsts = np.cumsum((0, *self._layout.section_counts[:-1])).astype(np.int64)
        return residuals_of_all(parts, firsts, self._layout.reduced_copies)


def make_combiner(layout: Layout) -> MeasuredGradients:
    """Return the combiner of gradients."""
    return MeasuredGradients(layout)


def _as_reduced(measured_W: Sequence[Measured | None]) -> list[Measured | None]:
    """Replace a loop's own reduced gradients by the mean that they are a multiple of.

    A loop that reduces after each micro-batch adds to reduced gradients: none is local then.
    """
    known = [one for one in measured_W if one is not None]
    if len(known) == len(measured_W) and reduced_between([one.found_B for one in known]):
        return [one._replace(values={**one.values, "grad_carried_over": 1.0}) for one in known]
    parts = [one.gradient.audit for one in known if one.gradient.audit is not None]
    if not parts or len(parts) < len(measured_W):
        return list(measured_W)
    found = normalise_user_reduction(parts)
    return [
        one._replace(
            gradient=replace(one.gradient, audit=part),
            values={
                **one.values,
                "reduced_norm": math.sqrt(part.reduced_squares_S.sum()),
                "unreduced": float(unreduced),
            },
        )
        for one, part, unreduced in zip(known, found.parts_W, found.unreduced_W, strict=True)
    ]


def _changes(measured_W: Sequence[Measured]) -> Floats | None:
    """Return changes of accumulated gradients between micro-batches ``[W, G]``, if any."""
    changes_WG = [one.changes_G for one in measured_W]
    if not all(len(changes_G) for changes_G in changes_WG):
        return None
    stacked = np.stack(changes_WG)
    return stacked if (stacked > 0).any() else None


def _fill_nonfinite(columns: Columns) -> None:
    counts_W = columns["grad_nonfinite"]
    columns["nonfinite"][:] |= (counts_W != MISSING_INT) & (counts_W > 0)
