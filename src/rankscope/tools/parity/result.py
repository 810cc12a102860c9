"""The answer of a comparison, and what a difference of two tensors looks like, in words."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from rankscope.bus.parity import QUARTERS
from rankscope.bus.words import listed
from rankscope.files import to_plain
from rankscope.stats.arrays import Floats
from rankscope.tools.parity.reading import Recording, Whole
from rankscope.tools.stages import DiffClass, Stage


class Kind(StrEnum):
    """The three answers, in the order of the command's exit codes."""

    SAME = "the same within rounding"
    DIFFERENT = "not the same"
    NOT_COMPARABLE = "not comparable"


ADVICE = {
    Stage.START: "Begin both with the same parameters, or use --same-start.",
    Stage.SAMPLES: "Compare the seeds, the shuffling and the sharding of the two data loaders.",
    Stage.LABELS: "Compare how labels are made, shifted, masked and cut off.",
    Stage.LOSS: "Compare the forward passes: masks, precision, and what the loss is divided by.",
    Stage.GRADIENT: "Compare what the loss is divided by, and how gradients are added up.",
    Stage.CLIPPING: "Clip by the norm of the whole model, each parameter counted once.",
    Stage.UPDATE: "Compare the optimizers: settings, groups, and which parameters they were given.",
    Stage.STATE: "Compare how moments, step counters and a gradient scaler are made and restored.",
    Stage.RANDOM: "Save and restore the random state of every rank.",
}
"""What to do, by the stage in which two trainings differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs by more than rounding explains.

    ``distance`` and ``bound`` (what rounding explains) are over the larger norm; ``factor`` is B
    over A along A's direction, ``cosine`` lies between the two; both are NaN if one is zero.
    ``look`` is in words.
    """

    name: str
    distance: float
    bound: float
    factor: float
    cosine: float
    look: str

    @property
    def words(self) -> str:
        """What it looks like, and how far it is off, unless it is not finite."""
        if not math.isfinite(self.distance):
            return f"{self.name}: {self.look}"
        return (
            f"{self.name}: {self.look}; off by {self.distance:.2g} of its norm, "
            f"rounding {self.bound:.1g}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer: ``stage`` and ``step`` are where the two differ first (None and -1 without).

    ``differences`` are those of ``num_tensors`` that differ there, farthest beyond their bound
    first; ``could_miss`` is by stage the relative size of the largest fault that could be missed,
    of the median tensor and of the worst; ``curves`` are distance over bound of each tensor and
    step, the largest of gradients and update; ``difference`` is the class that ``diff`` has for
    such runs, None where they are not comparable; ``cause`` is a setting that explains it, and
    its two values; ``remedy`` is what to do where more is known than the stage.
    """

    kind: Kind
    headline: str
    stage: Stage | None = None
    step: int = -1
    differences: tuple[Difference, ...] = ()
    num_tensors: int = 0
    notes: tuple[str, ...] = ()
    could_miss: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    num_steps: int = 0
    difference: DiffClass | None = None
    cause: str = ""
    remedy: str = ""

    @property
    def advice(self) -> str:
        """What to do, empty where nothing differs."""
        if self.cause:
            return f"Give both the same settings of the optimizer: {self.cause}"
        return self.remedy or ("" if self.stage is None else ADVICE[self.stage])

    @property
    def limits(self) -> str:
        """How small a fault would have to be in order to be missed, in a sentence; or empty."""
        if self.kind is Kind.NOT_COMPARABLE:
            return ""
        parts = [
            f"{kind}s by {median:.1g} of their norm ({worst:.1g} at worst)"
            for kind, (median, worst) in self.could_miss.items()
        ]
        return f"Smaller faults could be missed: {' and '.join(parts)}." if parts else ""

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        return list(Kind).index(self.kind)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values: no NaN, no infinity (those are null)."""
        document = {
            "answer": str(self.kind),
            "class": None if self.difference is None else str(self.difference),
            "headline": self.headline,
            "advice": self.advice,
            "stage": None if self.stage is None else str(self.stage),
            "step": self.step,
            "parameters": [asdict(each) for each in self.differences],
            "compared": self.num_tensors,
            "steps": self.num_steps,
            "notes": list(self.notes),
            "could_miss": {n: {"median": m, "worst": w} for n, (m, w) in self.could_miss.items()},
            "curves": {name: list(values) for name, values in self.curves.items()},
        }
        plain: dict[str, Any] = to_plain(document)
        return plain


NOT_FINITE = "not finite in both"  # what a tensor with infinities or NaN in both looks like

_PARALLEL = 0.999
_NEAR = 0.01
_CLOSE = 2e-4
_ORDINALS = ("first", "second", "third", "last")


def describe(name: str, first: Whole, second: Whole, bound: float) -> Difference:
    """Return how a tensor of B differs from that of A."""
    norm = max(first.norm, second.norm)
    apart_Q = np.linalg.norm(first.sketches_QK - second.sketches_QK, axis=1)
    distance = float(np.linalg.norm(apart_Q))
    factor, cosine = _relation(first.sketches_QK, second.sketches_QK)
    relative = distance / norm if norm > 0 else math.nan
    share = bound / norm if norm > 0 else math.nan
    if not math.isfinite(distance):
        own = np.isfinite(first.norm)
        other = np.isfinite(second.norm)
        look = NOT_FINITE if own == other else f"not finite in {'B' if own else 'A'}"
        return Difference(name, math.nan, share, math.nan, math.nan, look)
    parts = apart_Q > bound / math.sqrt(QUARTERS)
    held = first.squares_Q + second.squares_Q > 0
    look = _look(factor, cosine, first.norm, second.norm)
    if parts.any() and (held & ~parts).any():
        where = np.flatnonzero(parts)
        own = _relation(first.sketches_QK[where], second.sketches_QK[where])
        norms = [math.sqrt(each.squares_Q[where].sum()) for each in (first, second)]
        inside = _look(*own, *norms)
        quarters = listed([_ORDINALS[part] for part in where])
        look = f"{inside}, in the {quarters} quarter of its elements alone"
    return Difference(name, relative, share, factor, cosine, look)


def _relation(first: Floats, second: Floats) -> tuple[float, float]:
    """Return the factor of B along A, and the cosine; NaN where one is zero."""
    product = float((first * second).sum())
    own = float(np.linalg.norm(first))
    other = float(np.linalg.norm(second))
    factor = product / own**2 if own > 0 else math.nan
    cosine = product / (own * other) if own > 0 and other > 0 else math.nan
    return factor, cosine


def _look(factor: float, cosine: float, own: float, other: float) -> str:
    largest = max(own, other)
    if other <= 1e-6 * largest:
        return "zero in B"
    if own <= 1e-6 * largest:
        return "zero in A"
    if abs(cosine) >= _PARALLEL:
        return times(factor)
    return f"in another direction (cosine {cosine:.3g}, norm × {other / own:.3g})"


def times(factor: float) -> str:
    """Return a factor in words."""
    if factor < 0:
        return "the opposite sign" if abs(factor + 1) < _NEAR else f"× {factor:.4g}"
    if abs(factor - 1) < _CLOSE:
        return "nearly the same"
    shown = f"{factor:.4f}".rstrip("0") if abs(factor - 1) < _NEAR else _number(factor)
    return f"× {shown}"


def ratio_of(factor: float, sides: tuple[Recording, Recording]) -> str:
    """Return what a factor of all may be the ratio of; empty if of nothing."""
    a, b = sides
    counts = {
        "workers": b.workers / a.workers,
        "micro-batches": b.passes / a.passes,
        "workers × micro-batches": b.workers * b.passes / (a.workers * a.passes),
        "ranks": b.world / a.world,
    }
    for label, ratio in counts.items():
        if ratio == 1:
            continue
        for value, words in (
            (ratio, f"the ratio of {label}"),
            (1 / ratio, f"1 over the ratio of {label}"),
        ):
            if abs(factor / value - 1) < _NEAR:
                return words
    return ""


def _number(factor: float) -> str:
    if abs(factor - round(factor)) < _NEAR * factor and factor > 1.5:
        return str(round(factor))
    inverse = 1 / factor if factor else math.inf
    if abs(inverse - round(inverse)) < _NEAR * inverse and inverse > 1.5:
        return f"1/{round(inverse)}"
    return f"{factor:.3g}"
