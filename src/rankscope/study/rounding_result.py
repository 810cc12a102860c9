"""What is kept of pairs of trainings that differ in rounding: series, fits, and plain words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_POINTS = 4
"""A law of growth is fitted to at least so many steps."""

MIN_FACTOR = 3.0
"""Below it, what the first step has left hides how the rest grows: no law is said."""

PREFERENCE = 0.75
"""A power law is preferred unless an exponential misses by less than this part of its misses."""

MAX_RESIDUAL = 0.2
"""A law that misses by more decades on average is not said to describe the growth."""

CONTROL, ORDER, BFLOAT16, FLOAT16 = "control", "order", "bfloat16", "float16"
FLOAT16_SCALED, WORKERS, DATA = "float16-scaled", "workers", "data"
TITLES = {
    CONTROL: "the same again",
    ORDER: "arrival order",
    BFLOAT16: "bfloat16 buffers",
    FLOAT16: "float16 buffers",
    FLOAT16_SCALED: "float16 buffers, scaled loss",
    WORKERS: "twice the workers",
    DATA: "other data order",
}
"""What the second training of each pair does in another way, by the pair's name."""


@dataclass(frozen=True, slots=True)
class Law:
    """A law of growth, fitted by least squares to the logarithm of a distance.

    Attributes:
        name: ``power`` (``distance ~ n^exponent``, n the number of steps since the two parted) or
            ``exponential`` (``distance ~ 2^(n / doubling_steps)``).
        rate: The exponent, or doublings per step.
        residual: Root mean square of the fit's error, in decades.
    """

    name: str
    rate: float
    residual: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How fast a distance grows from the first step that has one to its largest value.

    Attributes:
        first_step: Where the growing part begins, from 1.
        last_step: Where it ends.
        factor: How many times as large it is then.
        laws: The fitted laws, the one that describes it first; empty with too few points.
    """

    first_step: int
    last_step: int
    factor: float
    laws: tuple[Law, ...]

    @property
    def words(self) -> str:
        """How it grows, as the end of a sentence; empty with too few points to tell."""
        if self.factor < MIN_FACTOR:
            return "grows less than threefold from there"
        if not self.laws:
            return ""
        law = self.laws[0]
        if law.residual > MAX_RESIDUAL or law.rate <= 0:
            return "grows in jumps"
        if law.name == "power":
            return f"grows as steps^{law.rate:.1f}"
        return f"doubles about every {1 / law.rate:.0f} steps"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        laws = [{"name": law.name, "rate": law.rate, "residual": law.residual} for law in self.laws]
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "factor": self.factor,
            "laws": laws,
            "words": self.words,
        }


def fit_growth(distances_T: Sequence[float]) -> Growth | None:
    """Fit a power law and an exponential to the growing part of a distance.

    The growing part goes from the first positive value to the largest one. Values of 0 and
    values that are not finite are left out of it.

    Args:
        distances_T: The distance after steps 1 … T.

    Returns:
        None when no value is positive.
    """
    values_T = np.asarray(distances_T, dtype=float)
    positive_T = np.isfinite(values_T) & (values_T > 0)
    if not positive_T.any():
        return None
    first = int(np.argmax(positive_T))
    last = int(np.argmax(np.where(positive_T, values_T, 0.0)))
    at = np.flatnonzero(positive_T[first : last + 1])
    laws: list[Law] = []
    if len(at) >= MIN_POINTS:
        logs = np.log10(values_T[first + at])
        elapsed = at + 1.0
        rate, residual = _line(np.log10(elapsed), logs)
        laws.append(Law("power", rate, residual))
        slope, residual = _line(elapsed, logs)
        laws.append(Law("exponential", slope / math.log10(2), residual))
    laws.sort(key=lambda law: law.residual * (PREFERENCE if law.name == "power" else 1.0))
    factor = float(values_T[last] / values_T[first])
    return Growth(first + 1, last + 1, factor, tuple(laws))


def _line(x: NDArray[np.floating[Any]], y: NDArray[np.floating[Any]]) -> tuple[float, float]:
    """Return slope and root mean square error of the least-squares line."""
    slope, offset = np.polyfit(x, y, 1)
    return float(slope), float(np.sqrt(np.mean((y - slope * x - offset) ** 2)))


@dataclass(frozen=True, slots=True)
class PairResult:
    """Two trainings, step by step; every list has one entry per step.

    Attributes:
        name: The pair: a key of :data:`TITLES`.
        distance: ``|a - b| / |a|`` of all parameters after the step, Euclidean.
        gradient_distance: The same of the reduced gradients of the step.
        max_ulp: Largest distance of two parameters in units in the last place. It is huge where a
            parameter near 0 has changed its sign.
        median_ulp: Median of that distance over the parameters whose bits differ; 0: none do.
        differing: Share of the parameters whose bits differ.
        loss_difference: Second training's loss on the step's global batch minus the first's.
        evaluation: Second training's loss minus the first's on held-out samples, at the steps of
            the result's ``evaluated``.
        layers: ``{group, first_step, distance}`` of each group of parameters: when its bits first
            differed (None: never), and its relative distance in the end.
        growth: How ``distance`` grows; None when it is 0 throughout.
        skipped: Steps that the scaler of the loss left out.
    """

    name: str
    distance: list[float]
    gradient_distance: list[float]
    max_ulp: list[float]
    median_ulp: list[float]
    differing: list[float]
    loss_difference: list[float]
    evaluation: list[float]
    layers: list[dict[str, Any]]
    growth: Growth | None
    skipped: int = 0

    @property
    def identical(self) -> bool:
        """Whether parameters, gradients and losses had the same bits throughout."""
        columns = (self.max_ulp, self.differing, self.gradient_distance, self.loss_difference)
        return all(value == 0 for column in columns for value in column)

    @property
    def first_step(self) -> int | None:
        """First step after which the parameters differ, from 1; None: never."""
        apart = (step for step, share in enumerate(self.differing, start=1) if share > 0)
        return next(apart, None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; numbers that are not finite become None."""
        series = {
            name: [_known(value) for value in getattr(self, name)]
            for name in (
                "distance", "gradient_distance", "max_ulp", "median_ulp", "differing",
                "loss_difference", "evaluation",
            )
        }  # fmt: skip
        return {
            "name": self.name,
            "title": TITLES[self.name],
            "identical": self.identical,
            "first_step": self.first_step,
            "skipped": self.skipped,
            "growth": self.growth.to_json() if self.growth else None,
            "layers": [{**layer, "distance": _known(layer["distance"])} for layer in self.layers],
            **series,
        }


@dataclass(frozen=True, slots=True)
class GrowthResult:
    """Trainings beside a first one that they differ from in one thing each.

    Attributes:
        options: The options as plain values.
        facts: Model, data, parameters, tokens per step: what a reader wants to know.
        evaluated: Steps after which the held-out loss was taken.
        loss: The first training's loss on each step's global batch, nats per token.
        evaluation: Its loss on held-out samples at ``evaluated``.
        pairs: The comparisons.
    """

    options: Mapping[str, Any]
    facts: Mapping[str, Any]
    evaluated: list[int]
    loss: list[float]
    evaluation: list[float]
    pairs: tuple[PairResult, ...] = field(default=())

    def pair(self, name: str) -> PairResult | None:
        """Return a pair by name; None when it was not run."""
        return next((pair for pair in self.pairs if pair.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, sentences and summary included."""
        return {
            "options": dict(self.options),
            "facts": dict(self.facts),
            "evaluated": self.evaluated,
            "loss": [_known(value) for value in self.loss],
            "evaluation": [_known(value) for value in self.evaluation],
            "pairs": [pair.to_json() for pair in self.pairs],
            "sentences": self.sentences(),
            "summary": self.summary(),
        }

    def sentences(self) -> list[str]:
        """Return what was seen, in plain words, from the measured numbers."""
        lines = [words for pair in self.pairs if (words := self._words(pair))]
        beside = self.summary()
        return [*lines, beside] if beside else lines

    def _words(self, pair: PairResult) -> str:
        title, steps = TITLES[pair.name].capitalize(), len(pair.distance)
        if pair.name == CONTROL:
            if pair.identical:
                return (
                    f"{title}: all {steps} steps gave the same bits. What differs below comes from "
                    "the reduction alone."
                )
            return (
                f"{title}: the bits differ, although nothing was changed. This machine does not "
                "repeat its own computations; the differences below are not rounding of the "
                "reduction alone."
            )
        if pair.identical:
            return f"{title}: the bits are the same in all {steps} steps."
        if pair.first_step is None:
            return f"{title}: gradients or losses differ, but no parameter did in {steps} steps."
        first = pair.distance[pair.first_step - 1]
        return (
            f"{title}: parts at step {pair.first_step} by {first:.1e} of the parameters' norm, "
            f"and is {pair.distance[-1]:.1e} apart after {steps} steps, with "
            f"{pair.differing[-1]:.0%} of the parameters different in their bits"
            f"{_law_in_words(pair.growth)}.{_skips_in_words(pair.skipped)}"
        )

    def summary(self) -> str:
        """Return how rounding's effect compares with that of another order of the data.

        Empty when one of these two pairs was not run, or its numbers are not finite.
        """
        data, order = self.pair(DATA), self.pair(ORDER)
        if data is None or order is None or not data.distance[-1] > 0:
            return ""
        share = order.distance[-1] / data.distance[-1]
        moved, sampled = (largest(pair.evaluation) for pair in (order, data))
        if not all(map(math.isfinite, (share, moved, sampled))):
            return ""
        return (
            f"Adding in arrival order moves the parameters {share:.0e} times as far as another "
            f"order of the data does. The held-out loss, {self.evaluation[-1]:.4f} nats per token, "
            f"changes by at most {moved:.0e} from rounding and {sampled:.0e} from the data's order."
        )


def largest(differences: Sequence[float]) -> float:
    """Return the largest size of some differences; NaN when one of them is."""
    return float(np.abs(np.asarray(differences, dtype=float)).max(initial=0.0))


def _law_in_words(growth: Growth | None) -> str:
    return f"; it {growth.words}" if growth is not None and growth.words else ""


def _skips_in_words(skipped: int) -> str:
    if not skipped:
        return ""
    steps = "1 step" if skipped == 1 else f"{skipped} steps"
    return f" The scaler left out {steps} that overflowed, until its scale fitted."


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
