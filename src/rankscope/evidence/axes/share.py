"""One rank's share of a step, and how it fits to those of the ranks along an axis of the mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rankscope.evidence.axes.norms import Squares
from rankscope.stats.rounding import tolerance_of

_TINY = 1e-12  # nats: below it a loss has no digits to compare


@dataclass(frozen=True, slots=True)
class AxesShare:
    """One rank's share of a step.

    Attributes:
        rank: Its rank in the job.
        lines: The ranks of the job along each axis, with this rank among them, by the axis's name.
        cut: Axes over which the model is cut, so that the ranks compute one loss together.
        sequences: Axes over which each sequence is cut.
        losses: The loss of each micro-batch or sample, per label token.
        weight: Number of label tokens behind them; None if unknown.
        samples: Digest of the inputs that identify samples.
        rows: Number of sequences.
        tokens: Number of tokens in them; 0 if unknown.
        dtype: The coarsest type in which the model computes.
        random: Digest of the states of the random generators that the forward pass used; None if it
            used none.
        squares: The squares of its gradients that the optimizer gets; None if unknown.
    """

    rank: int
    lines: Mapping[str, tuple[int, ...]]
    cut: tuple[str, ...]
    sequences: tuple[str, ...]
    losses: tuple[float, ...]
    weight: float | None
    samples: int
    rows: int
    tokens: float
    dtype: str
    random: int | None
    squares: Squares | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "AxesShare":
        """Return the share of plain values.

        Raises:
            TypeError, ValueError, AttributeError: They are none of a share.
        """
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
