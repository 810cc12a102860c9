"""One step of two recorded trainings, and which of its tensors differ by more than rounding."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.bus.parity import BUFFER, GRADIENT, QUARTERS, START, UNCLIPPED, UPDATE, WIDTH
from rankscope.bus.words import first_of
from rankscope.tools.parity.reading import (
    Bounds,
    Recording,
    SideStep,
    Whole,
    distance,
    factor,
    spread_distance,
)
from rankscope.tools.parity.result import NOT_FINITE, Answer, Difference, Kind, describe, ratio_of
from rankscope.tools.stages import Stage

_MOST_NOTES = 4
_LEAST_SCALER = 32.0
MUCH = 0.02
_GENERATORS = ("torch's on the CPU", "the accelerator's")  # those that a model draws from
_OF_COPIES = {
    START: (Stage.START, "parameters"),
    GRADIENT: (Stage.GRADIENT, "gradients"),
    UPDATE: (Stage.UPDATE, "updates"),
}


class Notes(list[str]):
    """Sentences beside the answer: a few, and each of them once."""

    def add(self, text: str, *, unless: str = "") -> None:
        """Add a sentence, unless there is one that begins like this."""
        known = any(note.startswith(unless) for note in self) if unless else text in self
        if text and not known and len(self) < _MOST_NOTES:
            self.append(text)


@dataclass(frozen=True, slots=True)
class StepPair:
    """One step that both sides have recorded; ``notes`` are those of the whole comparison."""

    number: int
    bounds: Bounds
    notes: Notes

    @property
    def sides(self) -> tuple[Recording, Recording]:
        """Both trainings."""
        return self.bounds.a, self.bounds.b

    @property
    def a(self) -> SideStep:
        """The step of A."""
        return self.bounds.a.steps[self.number]

    @property
    def b(self) -> SideStep:
        """The step of B."""
        return self.bounds.b.steps[self.number]

    @property
    def is_first(self) -> bool:
        """Whether it is the first step that both have."""
        return self.number == self.bounds.steps[0]

    def count(self, kind: str) -> int:
        """Return how many tensors of a kind are compared."""
        return max(len(both(self.a, self.b, kind)), 1)

    def apart(self, kind: str, *, start: bool = False) -> list[Difference]:
        """Return tensors of a kind beyond rounding, farthest first; ``start``: not computed."""
        a, b = (_unscaled(s) if kind == UNCLIPPED else s for s in (self.a, self.b))
        found = []
        for name, first, second in both(a, b, kind):
            bound = (
                self.bounds.of_start(name, max(first.norm, second.norm))
                if start
                else self.bounds.of(self.number, kind, name, first, second)
            )
            within = self._distance(kind, name, first, second) <= bound
            if not within or (not start and self._has_factor(kind, name, first, second)):
                found.append(describe(name, first, second, bound))
        return sorted(found, key=_beyond, reverse=True)

    def could_miss(self) -> dict[str, tuple[float, float]]:
        """Return the relative bounds of gradients and updates: the median one and the largest."""
        found = {}
        for kind in (GRADIENT, UPDATE):
            shares = sorted(
                self.bounds.of(self.number, kind, name, first, second) / norm
                for name, first, second in both(self.a, self.b, kind)
                if (norm := max(first.norm, second.norm)) > 0 and math.isfinite(norm)
            )
            if shares:
                found[kind] = (shares[len(shares) // 2], shares[-1])
        return found

    def distances_over_bounds(self) -> dict[str, float]:
        """Return distance over bound by tensor, the largest of its gradients and its update."""
        found: dict[str, float] = {}
        clip = all(
            step.facts.get("clipping seen") and step.figures.get(UNCLIPPED)
            for step in (self.a, self.b)
        )
        for kind in (GRADIENT, UPDATE, *[UNCLIPPED] * clip):
            a, b = (_unscaled(s) if kind == UNCLIPPED else s for s in (self.a, self.b))
            for name, first, second in both(a, b, kind):
                bound = self.bounds.of(self.number, kind, name, first, second)
                apart = self._distance(kind, name, first, second)
                ratio = apart / bound if bound > 0 else (math.inf if apart else 0.0)
                found[name] = max(found.get(name, 0.0), ratio)
        return found

    def differ(
        self,
        stage: Stage,
        words: str,
        found: Sequence[Difference],
        compared: int,
        what: str = "parameter",
    ) -> Answer:
        """Return the answer that ``found``, of ``compared`` tensors, differ in a stage."""
        common, count = Counter(each.look for each in found).most_common(1)[0]
        compared = max(compared, len(found))
        of_all = len(found) == compared and compared > 1
        which = f"all {compared} {what}s" if of_all else first_of([each.name for each in found])
        if common == NOT_FINITE and count == len(found):
            text = f"in step {self.number} the {stage} is not finite in both: {which}."
            return replace(not_comparable(text), differences=tuple(found), num_tensors=compared)
        look = common if count == len(found) else _range_of_looks(found, common, count)
        if len(found) == compared and count == len(found):
            ratio = ratio_of(found[0].factor, self.sides)
            look += f" ({ratio})" if ratio else ""
        answer = self.differ_by(stage, f"In step {self.number} {words}: {which}, {look}.")
        return replace(answer, differences=tuple(found), num_tensors=compared)

    def differ_by(self, stage: Stage, text: str) -> Answer:
        """Return the answer that the step differs in a stage, by something else than tensors."""
        return Answer(Kind.DIFFERENT, text, stage, self.number)

    @property
    def may_draw_otherwise(self) -> bool:
        """Whether the forward pass draws random numbers that may differ between the sides.

        A resumption in the same layout draws the same ones from the same random state.
        """
        if not any(side.drawn for side in self.sides):
            return False
        own = self.a.random
        other = self.b.random
        return not (
            any(step.facts.get("resumed") for step in self.bounds.a.steps.values())
            and set(own) == set(other)
            and all(has_same_generators(own[rank], other[rank]) for rank in own)
        )

    def _has_factor(self, kind: str, name: str, first: Whole, second: Whole) -> bool:
        """Return whether a factor is seen in what rounding has changed a lot."""
        norm = max(first.norm, second.norm)
        if kind in (START, BUFFER) or not norm > 0:
            return False
        if self.bounds.of(self.number, kind, name, first, second) < MUCH * norm:
            return False
        return abs(factor(first, second) - 1) > self.bounds.of_factor(self.number, kind, name)

    def _distance(self, kind: str, name: str, first: Whole, second: Whole) -> float:
        if kind == UPDATE:
            shape = self.bounds.a.shapes.get(name, (1,))
            return spread_distance(first, second, math.prod(shape))
        return distance(first, second)


def unequal_copies(pair: StepPair, *kinds: str) -> Answer | None:
    """Return that copies on ranks of one side differ."""
    least = max(1e-4, 32 * pair.bounds.roundoff)
    for kind in kinds:
        stage, what = _OF_COPIES[kind]
        for side, step in zip(pair.sides, (pair.a, pair.b), strict=True):
            there = [each for each in step.unequal if each.kind == kind and each.relative > least]
            if not there:
                continue
            ranks = sorted({rank for each in there for rank in each.ranks})
            who, verb = ("ranks", "hold") if len(ranks) > 1 else ("rank", "holds")
            answer = pair.differ_by(
                stage,
                f"In step {pair.number} of {side.name}, {who} {', '.join(map(str, ranks))} {verb} "
                f"other {what} than rank 0: {first_of([each.name for each in there])}.",
            )
            differences = tuple(
                Difference(each.name, each.relative, least, math.nan, math.nan, "copies differ")
                for each in there
            )
            return replace(answer, differences=differences)
    return None


def not_comparable(why: str) -> Answer:
    """Return the answer that two trainings cannot be compared."""
    return Answer(Kind.NOT_COMPARABLE, f"Not comparable: {why}")


def both(a: SideStep, b: SideStep, kind: str) -> list[tuple[str, Whole, Whole]]:
    """Return the figures of each tensor that a side has; a tensor of zeros where one has none."""
    own = a.figures.get(kind, {})
    other = b.figures.get(kind, {})
    zero = Whole(np.zeros(QUARTERS), np.zeros((QUARTERS, WIDTH)))
    names = dict.fromkeys([*own, *other])
    return [(name, own.get(name, zero), other.get(name, zero)) for name in names]


def has_same_generators(own: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two ranks hold the same state of the generators that a model draws from."""
    return all(own[name] == other.get(name) for name in own if name in _GENERATORS)


def _unscaled(step: SideStep) -> SideStep:
    """Return a step without the factor of a gradient scaler, which is a large power of two."""
    before = step.figures.get(UNCLIPPED, {})
    after = step.figures.get(GRADIENT, {})
    norms = [math.sqrt(sum(w.norm**2 for w in each.values())) for each in (before, after)]
    if not all(norms):
        return step
    scale = norms[0] / norms[1]
    exponent = math.log2(scale) if math.isfinite(scale) and scale > 0 else 0.0
    if scale < _LEAST_SCALER or abs(exponent - round(exponent)) > 1e-4:
        return step
    return replace(step, figures={**step.figures, UNCLIPPED: after})


def _beyond(each: Difference) -> float:
    if math.isnan(each.distance):
        return math.inf
    return each.distance / each.bound if each.bound > 0 else math.inf


def _range_of_looks(found: Sequence[Difference], common: str, count: int) -> str:
    if count > len(found) / 2:
        return f"most of them {common}"
    if all(each.look.startswith("×") for each in found):
        factors = [each.factor for each in found]
        return f"× {min(factors):.3g} to {max(factors):.3g}"
    return f"the first one {found[0].look}"
