"""How far two trainings may be apart by rounding alone: by theory, and as one run has shown.

A perturbation run is one of the two trainings again, with a quarter of its parameters' elements
moved by one unit in the last place before the first step. What it changes in a figure, another
order of summation may change as well; later steps grow apart as they do in that run.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.bus.parity import BUFFER, START, UPDATE
from rankscope.tools.parity.reading import Recording, SideStep, Whole

_TIMES = 4.0
"""The most by which rounding of another layout exceeds the change that the perturbation made."""

_SKETCH = 2e-6
"""Relative rounding of a sketch, which adds in float32."""

_STORED = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11}
"""Unit roundoffs of types that round away much of an update."""

_OF_LOSS = 16.0
_OF_FACTOR = 4.0
_FEW = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of two sides.

    ``moved`` is the perturbation run of the side ``original``, if there is one.
    """

    a: Recording
    b: Recording
    original: Recording | None = None
    moved: Recording | None = None
    _cached: dict[tuple[int, str], tuple[dict[str, float], float]] = field(default_factory=dict)
    _factors: dict[tuple[int, str], tuple[dict[str, float], float]] = field(default_factory=dict)
    _grown: dict[int, float] = field(default_factory=dict)

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the coarser side."""
        return max(self.a.roundoff, self.b.roundoff)

    @property
    def terms(self) -> float:
        """Roundings of a sum over micro-batches and workers, relative to its result.

        ``(M + W + 4)`` roundings, of terms whose norms together are up to ``sqrt(M W)`` times the
        norm of their mean where they are independent of each other.
        """
        return max(
            (s.passes + s.workers + 4) * math.sqrt(s.passes * s.workers) for s in (self.a, self.b)
        )

    def of_start(self, norm: float) -> float:
        """Return the distance of equal starts: that of a change of type."""
        rounded = 1.5 * self.roundoff if set(self.a.types) != set(self.b.types) else 0.0
        return (_SKETCH + rounded) * norm

    def of(self, step: int, kind: str, name: str, first: Whole, second: Whole) -> float:
        """Return the distance of one tensor's figures up to which rounding explains it."""
        norm = max(first.norm, second.norm)
        if kind in (START, BUFFER) and self.moved is None:
            return self.of_start(norm)
        change, relative = self._changes(step, kind)
        bound = (_SKETCH + self.roundoff * self.terms) * norm
        bound += _TIMES * max(change.get(name, 0.0), relative * norm) * self._growth(step)
        if kind == UPDATE:
            bound += self._of_stored(step, name)
        return bound

    def of_factor(self, step: int, kind: str, name: str) -> float:
        """Return how far from 1 the factor between two tensors may be by rounding.

        Where rounding is large, it changes a tensor's direction much more than its length, so a
        factor is seen that is small beside the distance. Infinity without a perturbation run.
        """
        key = (step, kind)
        if key not in self._factors:
            pair = self._perturbed(step)
            if pair is None:
                return math.inf
            own, other = (each.figures.get(kind, {}) for each in pair)
            known = {n: abs(factor(one, other[n]) - 1) for n, one in own.items() if n in other}
            finite = sorted(value for value in known.values() if math.isfinite(value))
            usual = finite[len(finite) * 3 // 4] if finite else math.inf
            self._factors[key] = known, usual
        changes, usual = self._factors[key]
        own_change = changes.get(name, math.inf)
        return _OF_FACTOR * self.roundoff + _TIMES * max(own_change, usual) * self._growth(step)

    def of_loss(self, step: int, first: float, second: float) -> float:
        """Return the difference of two losses up to which rounding explains it."""
        bound = (_SKETCH + _OF_LOSS * self.roundoff) * max(abs(first), abs(second))
        pair = self._perturbed(step)
        if pair is not None:
            change = abs(pair[0].loss - pair[1].loss) * self._growth(step)
            bound += _TIMES * change if math.isfinite(change) else 0.0
        return bound

    def _growth(self, step: int) -> float:
        """Return how much farther apart both sides begin a step than the perturbation run does.

        All that came before was found to be rounding: a sign of Adam's first update, say, where a
        gradient is almost zero.
        """
        first = min(set(self.a.steps) & set(self.b.steps))
        if step == first or self.original is None or self.moved is None:
            return 1.0
        if step not in self._grown:
            pairs = ((self.a, self.b), (self.original, self.moved))
            steps = [(x.steps.get(step), y.steps.get(step)) for x, y in pairs]
            own, other = (
                math.inf if x is None or y is None else _distances(x, y, START)[1] for x, y in steps
            )
            grown = own / other if 0 < other < math.inf and math.isfinite(own) else 1.0
            self._grown[step] = max(grown, 1.0)
        return self._grown[step]

    def _of_stored(self, step: int, name: str) -> float:
        """Return how much of an update the type of the parameters may round away."""
        sizes = []
        for side in (self.a, self.b):
            coarse = max((_STORED.get(each, 0.0) for each in side.types), default=0.0)
            whole = side.steps[step].figures.get(START, {}).get(name)
            sizes.append(coarse * whole.norm if whole is not None else 0.0)
        return max(sizes)

    def _changes(self, step: int, kind: str) -> tuple[dict[str, float], float]:
        """Return what the perturbation changed in each tensor, and in all, over their norm."""
        key = (step, kind)
        if key not in self._cached:
            pair = self._perturbed(step)
            self._cached[key] = ({}, 0.0) if pair is None else _distances(*pair, kind)
        return self._cached[key]

    def _perturbed(self, step: int) -> tuple[SideStep, SideStep] | None:
        """Return a step of the side that was run again, and of the perturbation run."""
        if self.original is None or self.moved is None:
            return None
        own, other = self.original.steps.get(step), self.moved.steps.get(step)
        return None if own is None or other is None else (own, other)


def _distances(first: SideStep, second: SideStep, kind: str) -> tuple[dict[str, float], float]:
    before, after = first.figures.get(kind, {}), second.figures.get(kind, {})
    change = {name: distance(one, after[name]) for name, one in before.items() if name in after}
    total = math.sqrt(sum(one.norm**2 for one in before.values()))
    apart = math.sqrt(sum(value**2 for value in change.values()))
    shares = sorted(change[name] / one.norm for name, one in before.items()
                    if name in change and one.norm > 0)  # fmt: skip
    usual = shares[len(shares) * 3 // 4] if shares else 0.0
    return change, max(apart / total if total > 0 else 0.0, usual)


def distance(first: Whole, second: Whole) -> float:
    """Return the distance of two tensors as their sketches show it: RMS error 9 % of itself."""
    return float(np.linalg.norm(first.sketches_QK - second.sketches_QK))


def factor(first: Whole, second: Whole) -> float:
    """Return the second over the first, along its direction; NaN if that is zero.

    The few numbers of the sketches that differ most do not count: see :func:`spread_distance`.
    """
    own, other = first.sketches_QK.reshape(-1), second.sketches_QK.reshape(-1)
    kept = np.argsort(np.abs(own - other))[: len(own) - _FEW]
    square = float(np.square(own[kept]).sum())
    return float((own[kept] * other[kept]).sum()) / square if square else math.nan


def spread_distance(first: Whole, second: Whole, size: int) -> float:
    """Return the distance of two updates without a few elements.

    An update of Adam has the sign of an element of the gradient: where that is zero but for
    rounding, two layouts go opposite ways. One element is in one number of a sketch, so the largest
    numbers of the difference are left out, of tensors with many elements (``size``).
    """
    apart = np.sort(np.square(first.sketches_QK - second.sketches_QK), axis=None)
    few = 0 if size < _FEW * _FEW else _FEW
    return float(np.sqrt(apart[: len(apart) - few].sum()))


def identical(a: Recording, b: Recording) -> bool:
    """Return whether two sides have the same figures, bit for bit, in the steps of both."""
    steps = [(a.steps[n], b.steps[n]) for n in sorted(set(a.steps) & set(b.steps))]
    return bool(steps) and all(_same(first, second) for first, second in steps)


def _same(a: SideStep, b: SideStep) -> bool:
    if set(a.figures) != set(b.figures) or a.counters != b.counters:
        return False
    return all(
        set(a.figures[kind]) == set(b.figures[kind])
        and all(distance(one, b.figures[kind][name]) == 0 for name, one in a.figures[kind].items())
        for kind in a.figures
    )
