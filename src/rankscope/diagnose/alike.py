"""Pairs and blocks of workers whose gradients resemble each other too much.

The pairs of a step are exchangeable when its workers are, so the test that compares workers
(:mod:`rankscope.core.exchangeability`) compares pairs just as well, in their cosine. Pairs that
exact evidence speaks of (identical batches), and those of workers that were found to differ or
cannot be compared, are left out.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import numpy as np

from rankscope.bus.words import count
from rankscope.core.apart import HEALED
from rankscope.core.arrays import Floats
from rankscope.core.bets import AT_ONCE, Kind, pair_bets
from rankscope.core.budget import (
    FAR_BELOW,
    PAIRS,
    alarm_level,
    bound_in_words,
    false_alarm_bound,
)
from rankscope.core.direction import upper_triangle
from rankscope.core.exchangeability import Ahead, ExchangeabilityTest
from rankscope.core.finding import Severity
from rankscope.core.step import GatheredStep
from rankscope.diagnose.evidence import Detector, Evidence, Observation, Stretch
from rankscope.diagnose.lasting import Span

FEWEST, MOST = 3, 64
"""Numbers of workers among which pairs are compared."""

KEY = "pairs-alike"
_SUSPICIOUS = 0.6
_ROW = np.zeros(1, np.int64)

Pair = tuple[int, int]


class AlikePairs(Detector):
    """Finds workers whose gradients resemble each other more than those of other pairs.

    Args:
        num_workers: W.
        not_compared: Tells which workers are to be left out of the step.
    """

    SETTINGS = ("_num_workers", "_not_compared", "_pairs", "_ahead")

    def __init__(self, num_workers: int, not_compared: Callable[[], Sequence[int]]) -> None:
        self._num_workers = num_workers if FEWEST <= num_workers <= MOST else 0
        self._not_compared = not_compared
        self._pairs: list[Pair] = list(combinations(range(self._num_workers), 2))
        self._test = ExchangeabilityTest(
            len(self._pairs), np.ones(1), np.zeros(1, bool), pair_bets()
        )
        self._active: set[int] = set()
        self._ranks: set[int] = set()
        self._span = Span()
        self._told = self._steps = 0
        self._excess = 0.0
        self._many = False
        self._ahead: tuple[Stretch, range, Ahead] | None = None

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step; speaks of pairs that begin, go on, or cease to be too much alike."""
        cosines_WW = step.report.cosines_WW
        if not self._num_workers or cosines_WW is None:
            return ()
        self._steps += 1
        if not self._take_ahead(step):
            self._test.observe(self._cosines(cosines_WW, step)[None], _ROW, step.gathered.step)
        changed = self._follow(step.gathered.step)
        level = alarm_level(PAIRS)
        if self._test.most_evidence < FAR_BELOW * level:
            return (self._evidence(),) if changed else ()
        while (evidence_P := self._test.evidence_of_units()).sum() >= level:
            self._open(evidence_P, step.gathered)
            changed = True
        return (self._evidence(),) if changed else ()

    def close(self) -> Iterable[Evidence]:
        """End the run; tells the last state."""
        return (self._evidence(),) if self._active else ()

    def _take_ahead(self, step: Observation) -> bool:
        """Take a step in which no pair is left out, if there are others to look ahead in.

        The same, bit for bit, as if the step were compared by itself.
        """
        if self._test.set_apart or step.identical or self._not_compared():
            self._ahead = None
            return False
        ahead = self._ahead
        if ahead is None or ahead[0] is not step.stretch or step.index not in ahead[1]:
            ahead = self._ahead = self._look_ahead(step)
        if ahead is None:
            return False
        self._test.take(ahead[2], step.index - ahead[1].start, step.gathered.step)
        return True

    def _look_ahead(self, step: Observation) -> tuple[Stretch, range, Ahead] | None:
        most = max(2, AT_ONCE // len(self._pairs))
        pairs: list[Floats] = []
        for report in step.stretch.reports[step.index : step.index + most]:
            if report.cosines_WW is None:
                break
            pairs.append(upper_triangle(report.cosines_WW))
        if len(pairs) < 2:
            return None
        ahead = self._test.look_ahead(np.array(pairs, np.float64)[:, None], _ROW)
        return step.stretch, range(step.index, step.index + len(pairs)), ahead

    def _cosines(self, cosines_WW: Floats, step: Observation) -> Floats:
        """Return the cosine of each pair that is to be compared, NaN for others."""
        left_out = list(self._not_compared())
        if step.identical or left_out:
            cosines_WW = cosines_WW.copy()
        for group in step.identical:
            cosines_WW[np.ix_(group, group)] = np.nan
        if left_out:
            cosines_WW[left_out] = cosines_WW[:, left_out] = np.nan
        return upper_triangle(cosines_WW).astype(np.float64)

    def _open(self, evidence_P: Floats, gathered: GatheredStep) -> None:
        """Set the strongest pair apart, with all pairs of the block that it belongs to."""
        log_P = np.log1p(evidence_P * len(self._pairs))
        strongest = int(log_P.argmax())
        block = _connected(
            self._pairs[strongest],
            [self._pairs[p] for p in np.flatnonzero(log_P >= _SUSPICIOUS * log_P[strongest])],
        )
        age = self._test.steps_since(strongest, 0, Kind.UP)
        members = [index for index, pair in enumerate(self._pairs) if block.issuperset(pair)]
        odd = self._test.odd_ones_out(members, 0, age)
        involved = {worker for index in odd or () for worker in self._pairs[index]}
        self._many = self._many or odd is None or 2 * len(involved) >= self._num_workers
        if self._span.count == 0:
            self._span.first = self._test.onset(strongest, 0, Kind.UP)
            self._span.count = max(1, gathered.step - self._span.first)
        apart = self._test.set_apart
        for index, pair in enumerate(self._pairs):
            if block.issuperset(pair) and index not in apart:
                self._test.set_unit_apart(index)
                self._active.add(index)
        self._ranks |= block
        self._span.last = gathered.step

    def _follow(self, step: int) -> bool:
        """Count on and take healed pairs back; return whether that is worth telling."""
        if not self._active:
            return False
        self._span.count += 1
        certain = {pair: self._test.certainty(pair) for pair in self._active}
        if max(certain.values()) >= 1:
            self._span.last = step
        if max(certain.values()) > HEALED:
            return self._span.count >= 2 * self._told
        for pair in self._active:  # a block heals as a whole
            self._test.take_back(pair)
        self._active = set()
        return True

    def _evidence(self) -> Evidence:
        self._told = self._span.count
        ranks = tuple(sorted(self._ranks))
        many = self._many or 2 * len(ranks) >= self._num_workers
        self._span.open = bool(self._active)
        return self._span.evidence(
            "data.overlapping_shards",
            Severity.NOTE if many else Severity.WARNING,
            ranks,
            {
                "above": f"{self._above():+.2f}".replace("-", "−"),
                "steps": count(self._steps, "step"),
                "bound": bound_in_words(self._steps),
            },
            {
                "cosine_above_other_pairs": self._above(),
                "steps_compared": self._steps,
                "false_alarm_probability": false_alarm_bound(self._steps),
            },
            key=KEY,
        )

    def _above(self) -> float:
        """Return by how much the cosine of the pairs exceeds that of others, the median."""
        traces = [self._test.traces(pair)[:1] for pair in self._active]
        deviations = [trace.deviation for found in traces for trace in found]
        if deviations:
            self._excess = float(np.median(deviations))
        return self._excess


def _connected(start: Pair, pairs: Iterable[Pair]) -> set[int]:
    """Return the workers that pairs link to the first pair."""
    block, rest = set(start), list(pairs)
    while linked := [pair for pair in rest if block & set(pair)]:
        block.update(*linked)
        rest = [pair for pair in rest if not block & set(pair)]
    return block
