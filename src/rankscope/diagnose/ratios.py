"""Ratios of observed to expected dispersion over a run: where they stand, and where they drift."""

import math
from collections.abc import Iterable

from rankscope.core.block_ratio import BlockRatio, Estimate, difference, ratio_of_sums
from rankscope.core.finding import Severity
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.persistent_fault import PersistentFault

CERTAIN_Z = 5.0
"""Standard errors that a ratio must lie from where it should be."""

BAND = 1.4
"""Ratios from 1/BAND to BAND count as 1 where only samples tell: with few samples in a batch, of
lengths that vary much, the expected dispersion is biased by some ten per cent."""

LEAST_CHANGE = 1.25
_BACK = 1.2
_STEPS_OF_A_BLOCK = 4


class RatioWatch(Stateful):
    """Watches one ratio; all that it finds are notes.

    It looks only when a block of at least four steps is complete, so after 132 steps at the
    earliest, and then 32 times each time that the run has become twice as long: shorter blocks are
    too skewed for an interval that is to be trusted far out.

    Args:
        what: What is compared, in the plural.
        drift: Key of the finding that it drifts.
    """

    SETTINGS = ("_what", "_drift_key")

    def __init__(self, what: str, drift: str = "sampling.drift") -> None:
        self._what = what
        self._drift_key = drift
        self._ratio = BlockRatio()
        self._drift = _Note()
        self._level = _Note()

    def add(
        self, step: int, observed: float, expected: float, *, exact: bool
    ) -> Iterable[Evidence]:
        """Take one step's variances.

        Args:
            step: Its number.
            observed: Variance between workers; a step with NaN is left out.
            expected: The variance that sampling explains.
            exact: Whether exact e-values judge the level of this ratio.
        """
        if not self._ratio.add(observed, expected):
            return
        earlier, later = (ratio_of_sums(half, root=True) for half in self._ratio.halves())
        if self._ratio.length >= _STEPS_OF_A_BLOCK and self._drift.update(
            step, _has_drifted(earlier, later), difference(earlier, later)
        ):
            yield self._say_drift(earlier, later)
        both = ratio_of_sums(self._ratio.sums(), root=True)
        judged = not exact and self._ratio.length >= _STEPS_OF_A_BLOCK
        if judged and self._level.update(step, _is_off(later, both), _distance(later)):
            yield self._say_level(later)

    def _say_drift(self, earlier: Estimate, later: Estimate) -> Evidence:
        fields = {"what": self._what, "early": f"{earlier.value:.2f}", "late": f"{later.value:.2f}"}
        numbers = {
            "early": earlier.value,
            "late": later.value,
            "standard_errors": self._drift.distance,
        }
        return self._drift.describe(self._drift_key, "inconclusive", fields, numbers)

    def _say_level(self, ratio: Estimate) -> Evidence:
        low = ratio.value < 1
        fields = {
            "what": self._what,
            "ratio": f"{ratio.value:.2f}",
            "low": f"{ratio.low:.2f}",
            "high": f"{ratio.high:.2f}",
            "reading": "as if workers shared data" if low else "as if their data differed in kind",
        }
        numbers = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        cause = "data.duplicate_batches" if low else "inconclusive"
        return self._level.describe("sampling.ratio", cause, fields, numbers)


class _Note(PersistentFault):
    """A note that opens when it is certain, and closes when what it says is no longer so."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = 0.0

    def update(self, step: int, is_so: bool | None, distance: float) -> bool:
        """Take what holds now; None between the limits, where all stays as it was.

        Returns:
            Whether there is something to tell.
        """
        before = self.open
        if is_so is not None:
            self.open = is_so
        if self.open:
            self.see(step)
            self.distance = distance
        return before or self.open

    def describe(
        self, key: str, cause: str, fields: dict[str, str], numbers: dict[str, float]
    ) -> Evidence:
        """Return the note."""
        known = {name: v if math.isfinite(v) else None for name, v in numbers.items()}
        return self.evidence(cause, Severity.NOTE, (), fields, known, key=key)


def _has_drifted(earlier: Estimate, later: Estimate) -> bool | None:
    distance = abs(difference(earlier, later))
    larger, smaller = max(earlier.value, later.value), min(earlier.value, later.value)
    if distance > CERTAIN_Z and larger > LEAST_CHANGE * smaller:
        return True
    return False if distance < CERTAIN_Z / 2 or larger < _BACK * smaller else None


def _is_off(later: Estimate, both: Estimate) -> bool | None:
    """Return whether the later half is off, and the whole run in the same direction."""
    off = _factor(later)
    if off < _BACK:
        return False
    same = (later.value < 1) == (both.value < 1)
    sure = min(_distance(later), _distance(both)) > CERTAIN_Z
    return True if off > BAND and same and sure else None


def _factor(ratio: Estimate) -> float:
    return max(ratio.value, 1 / ratio.value) if ratio.value > 0 else math.inf


def _distance(ratio: Estimate) -> float:
    return abs(difference(Estimate(1.0, error=0.0), ratio))
