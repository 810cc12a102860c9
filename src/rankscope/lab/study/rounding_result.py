"""Pairs of trainings that differ in rounding: their options and their results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.words import count
from rankscope.files import to_plain
from rankscope.lab.study.config import StudyConfig

MIN_POINTS = 4  # no growth is estimated over fewer steps

MIN_FACTOR = 3.0  # below it, the first step's difference hides the growth of the rest

PREFERENCE = 0.75  # a power law unless an exponential's misses are less than this part of its own

MAX_RESIDUAL = 0.2  # a law that misses by more decades on average does not describe the growth

CONTROL = "control"
ORDER = "order"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"
FLOAT16_SCALED = "float16-scaled"
WORKERS = "workers"
DATA = "data"
TITLES = {
    CONTROL: "the same again",
    ORDER: "arrival order",
    BFLOAT16: "bfloat16 buffers",
    FLOAT16: "float16 buffers",
    FLOAT16_SCALED: "float16 buffers, scaled loss",
    WORKERS: "twice the workers",
    DATA: "other data order",
}
"""The difference of the second training of each pair, by the pair's name."""

MODEL = "small"
SGD_LEARNING_RATE = 0.05


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    """The trainings, and the pairs to compare."""

    steps: int = 60  # optimizer steps
    workers: int = 8  # W of the first training; a global batch has 2 W micro-batches of one sample
    seed: int = 0  # decides data, initial weights, order of the data and orders of arrival
    learning_rate: float = 0.0  # 0 for the study's own (AdamW), or 0.05 (SGD)
    # what to compare with the first training: keys of ``TITLES``
    pairs: tuple[str, ...] = tuple(TITLES)
    optimizer: str = "adamw"  # ``adamw`` or ``sgd``
    evaluations: int = 10  # how often the held-out loss is taken, evenly over the steps
    base_steps: int = 120  # steps of the base training; 0 leaves the model's weights random
    loss_scale: float = 1024.0  # where the scaler of ``float16-scaled`` begins: a power of two

    @property
    def num_micro(self) -> int:
        """M, the micro-batches of a global batch."""
        return 2 * self.workers

    @property
    def effective_learning_rate(self) -> float:
        """The learning rate that is used."""
        default = StudyConfig().effective_learning_rate
        return self.learning_rate or (default if self.optimizer == "adamw" else SGD_LEARNING_RATE)

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        rate = self.effective_learning_rate
        return {**asdict(self), "pairs": list(self.pairs), "learning_rate": rate, "model": MODEL}


@dataclass(frozen=True, slots=True)
class Law:
    """A law of growth, fitted by least squares to the logarithm of a distance.

    ``power``: ``distance ~ n^rate``, n the number of steps since the two parted; ``exponential``:
    ``distance ~ 2^(n rate)``. ``residual`` is the root mean square of the fit's error, in decades.
    """

    name: str
    rate: float
    residual: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How a distance grows from its first step (from 1) to its largest value, by a factor."""

    first_step: int
    last_step: int
    factor: float
    laws: tuple[Law, ...]

    @property
    def words(self) -> str:
        """How it grows, as the end of a sentence; empty with too few points."""
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
        return {**asdict(self), "words": self.words}


def fit_growth(distances_T: Sequence[float]) -> Growth | None:
    """Fit a power law and an exponential to the growing part of a distance after steps 1 … T.

    The growing part goes from the first positive value to the largest one. Values of 0 and
    values that are not finite are left out of it. None with fewer than ``MIN_POINTS`` positive
    values.
    """
    values_T = np.asarray(distances_T, dtype=float)
    positive_T = np.isfinite(values_T) & (values_T > 0)
    if positive_T.sum() < MIN_POINTS:
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

    ``name`` is a key of :data:`TITLES`; ``distance`` is ``|a - b| / |a|`` of all parameters after
    the step, Euclidean. ``max_ulp`` is the largest distance of two parameters in units in the last
    place, huge where one near 0 has changed its sign; ``median_ulp`` the median over those whose
    bits differ, 0 if none do; ``differing`` their share. ``loss_difference`` (on the step's global
    batch) and ``evaluation`` (on held-out samples, at the result's ``evaluated``) are second minus
    first. Each of ``layers`` is ``{group, first_step, distance}``: when its bits first differed
    (None: never), and its relative distance in the end. ``growth`` is None when fewer than
    ``MIN_POINTS`` distances are positive; ``skipped`` are the steps that the scaler of the loss
    left out.
    """

    name: str
    distance: list[float] = field(default_factory=list)
    gradient_distance: list[float] = field(default_factory=list)
    max_ulp: list[float] = field(default_factory=list)
    median_ulp: list[float] = field(default_factory=list)
    differing: list[float] = field(default_factory=list)
    loss_difference: list[float] = field(default_factory=list)
    evaluation: list[float] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    growth: Growth | None = None
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
        values: dict[str, Any] = to_plain(
            {
                **asdict(self),
                "title": TITLES[self.name],
                "identical": self.identical,
                "first_step": self.first_step,
                "growth": self.growth and self.growth.to_json(),
            }
        )
        return values


@dataclass(frozen=True, slots=True)
class GrowthResult:
    """Trainings beside a first one that they differ from in one thing each.

    ``loss`` is the first one's on each step's global batch, ``evaluation`` its loss on held-out
    samples after the steps ``evaluated``, in nats per token; ``facts`` are shown to readers.
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
        values: dict[str, Any] = to_plain(
            {
                **asdict(replace(self, pairs=())),
                "pairs": [pair.to_json() for pair in self.pairs],
                "sentences": self.sentences(),
                "summary": self.summary(),
            }
        )
        return values

    def sentences(self) -> list[str]:
        """Return the results in plain words, from the measured numbers."""
        lines = [words for pair in self.pairs if (words := self._words(pair))]
        beside = self.summary()
        return [*lines, beside] if beside else lines

    def _words(self, pair: PairResult) -> str:
        title = TITLES[pair.name].capitalize()
        steps = len(pair.distance)
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
        law = f"; it {pair.growth.words}" if pair.growth and pair.growth.words else ""
        return (
            f"{title}: parts at step {pair.first_step} by {first:.1e} of the parameters' norm, "
            f"and is {pair.distance[-1]:.1e} apart after {steps} steps, with "
            f"{pair.differing[-1]:.0%} of the parameters different in their bits"
            f"{law}.{_skips_in_words(pair.skipped)}"
        )

    def summary(self) -> str:
        """Return how rounding's effect compares with that of another order of the data."""
        data = self.pair(DATA)
        order = self.pair(ORDER)
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


def _skips_in_words(skipped: int) -> str:
    if not skipped:
        return ""
    return f" The scaler left out {count(skipped, 'step')} that overflowed, until its scale fitted."
