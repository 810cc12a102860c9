"""One rank's share of a step, and how it fits to those of the ranks along an axis of the mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankscope.stats.rounding import tolerance_of

_TINY = 1e-12  # nats: below it a loss has no digits to compare


class Squares(NamedTuple):
    """One rank's squares of its gradients' elements, summed, in a step.

    In the sum over its ranks, copies inside a data-parallel group count once.
    """

    run: int  # lowest rank of its data-parallel group in the job
    num_ranks: int
    sums: dict[str, float]  # by axes that hold alike, joined by commas
    rounding: float  # relative error of a norm after clipping


@dataclass(frozen=True, slots=True)
class AxesShare:
    """One rank's share of a step."""

    rank: int
    lines: Mapping[str, tuple[int, ...]]  # ranks of the job along each axis, this one among them
    cut: tuple[str, ...]  # axes over which the model is cut: the ranks compute one loss together
    sequences: tuple[str, ...]  # axes over which each sequence is cut
    losses: tuple[float, ...]  # loss of each micro-batch or sample, per label token
    weight: float | None  # number of label tokens behind them; None if unknown
    samples: int  # digest of the inputs that identify samples
    rows: int
    tokens: float  # number of tokens in them; 0 if unknown
    dtype: str  # coarsest type in which the model computes
    random: int | None  # digest of the states of generators that the forward pass used
    squares: Squares | None = None  # of the gradients that the optimizer gets; None if unknown

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "AxesShare":
        """Return the share of plain values."""
        lists = {name: tuple(values[name]) for name in ("cut", "sequences", "losses")}
        lines = {name: tuple(map(int, line)) for name, line in values["lines"].items()}
        squares = values["squares"] and Squares(*values["squares"])
        return cls(**{**values, **lists, "lines": lines, "squares": squares})


def loss_distance(shares_T: Sequence[AxesShare]) -> float:
    """Return by how much the losses along an axis differ, relative to the largest; 0 if they agree.

    The ranks have the same samples, and together count more label tokens than these have: so they
    cannot have divided the labels, and each computes the loss of all of them. A difference up to
    :func:`~rankscope.stats.rounding.tolerance_of` is rounding.
    """
    first = shares_T[0]
    alike = all(
        (one.samples, one.rows, one.weight, len(one.losses))
        == (first.samples, first.rows, first.weight, len(first.losses))
        for one in shares_T
    )
    if not alike or first.weight is None or not first.tokens:
        return 0.0
    if len(shares_T) * first.weight <= first.tokens:
        return 0.0
    apart = 0.0
    for losses_T in zip(*(one.losses for one in shares_T), strict=True):
        largest = max(map(abs, losses_T))
        if math.isfinite(largest) and largest > _TINY:
            apart = max(apart, (max(losses_T) - min(losses_T)) / largest)
    return apart if apart > max(tolerance_of(one.dtype) for one in shares_T) else 0.0


def lost_labels(shares_T: Sequence[AxesShare]) -> tuple[int, int]:
    """Return how many labels of one sequence's parts are never predicted, and how many could be.

    Where every rank counts one label less than it has tokens in each row, labels are shifted inside
    each part. The first token of a part is then predicted by nobody, though the part before it
    could; only that of the sequence itself has nothing before it.
    """
    inside = all(
        one.rows and one.weight == one.tokens - one.rows and one.tokens > one.rows
        for one in shares_T
    )
    parts_differ = len({one.samples for one in shares_T}) == len(shares_T)
    if not inside or not parts_differ or len({one.rows for one in shares_T}) > 1:
        return 0, 0
    rows = shares_T[0].rows
    offered = round(sum(one.tokens for one in shares_T)) - rows
    return rows * (len(shares_T) - 1), offered
