"""Pairs of workers whose gradients resemble each other more than those of other pairs.

Legend of shapes: P pairs of workers, W workers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, takewhile

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count
from rankscope.stats.arrays import Floats
from rankscope.stats.bets import (
    AT_ONCE,
    FAR_BELOW,
    PAIRS,
    BetKind,
    alarm_level,
    bound_in_words,
    false_alarm_bound,
    pair_bets,
)
from rankscope.stats.direction import upper_triangle
from rankscope.stats.exchangeability import ExchangeabilityTest
from rankscope.stats.units import HEALED

FEWEST = 3
MOST = 64
"""Numbers of workers among which pairs are compared."""

KEY = "pairs-alike"
_SUSPICIOUS = 0.6

Pair = tuple[int, int]


class AlikePairs(Detector):
    """Finds workers whose gradients resemble each other more than those of other pairs."""

    SETTINGS = ("_num_workers", "_not_compared", "_pairs")

    def __init__(self, num_workers: int, not_compared: Callable[[], Sequence[int]]) -> None:
        self._num_workers = num_workers if FEWEST <= num_workers <= MOST else 0
        self._not_compared = not_compared
        self._pairs: list[Pair] = list(combinations(range(self._num_workers), 2))
        self._test = ExchangeabilityTest(
            len(self._pairs), np.ones(1), np.zeros(1, bool), pair_bets()
        )
        self._active: set[int] = set()
        self._ranks: set[int] = set()
        self._span = PersistentFault()
        self._count_reported = self._steps = 0
        self._excess = 0.0
        self._many = False

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield pairs that begin, go on, or cease to be too alike."""
        compared: Iterator[int] = iter(())
        left_out: tuple[int, ...] = ()
        for step in steps:
            if not self._has_cosines(step):
                yield ()
                continue
            before = left_out
            left_out = tuple(self._not_compared())
            if left_out != before or next(compared, None) is None:
                piece = self._next_piece(steps, step.index)
                values = np.array([self._cosines(one, left_out) for one in piece])
                numbers = [one.gathered.step for one in piece]
                compared = self._test.observe(values[:, None], numbers)
                next(compared)
            yield self._judge(step)

    def _judge(self, step: Step) -> Iterable[FaultEvidence]:
        """Return the changes of a step that was compared."""
        self._steps += 1
        changed = self._follow(step.gathered.step)
        level = alarm_level(PAIRS)
        if self._test.most_evidence < FAR_BELOW * level:
            return (self._evidence(),) if changed else ()
        while (evidence_P := self._test.evidence_of_units()).sum() >= level:
            self._open(evidence_P, step.gathered)
            changed = True
        return (self._evidence(),) if changed else ()

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; report the last state."""
        return (self._evidence(),) if self._active else ()

    def _has_cosines(self, step: Step) -> bool:
        return self._num_workers > 0 and step.report.cosines_WW is not None

    def _next_piece(self, steps: StepBatch, start: int) -> list[Step]:
        """Return the steps with cosines from ``start`` on, as many as are best compared at once."""
        end = start + max(1, AT_ONCE // len(self._pairs))
        rest = (steps[at] for at in range(start, min(end, len(steps))))
        return list(takewhile(self._has_cosines, rest))

    def _cosines(self, step: Step, left_out: Sequence[int]) -> Floats:
        """Return the cosine of each pair that is to be compared, NaN for others."""
        cosines_WW = step.report.cosines_WW
        assert cosines_WW is not None
        if step.identical or left_out:
            cosines_WW = cosines_WW.copy()
        for group in step.identical:
            cosines_WW[np.ix_(group, group)] = np.nan
        if left_out:
            rows = list(left_out)
            cosines_WW[rows] = cosines_WW[:, rows] = np.nan
        return upper_triangle(cosines_WW).astype(np.float64)

    def _open(self, evidence_P: Floats, gathered: GatheredStep) -> None:
        """Flag the strongest pair, with all pairs of the block that it belongs to."""
        log_P = np.log1p(evidence_P * len(self._pairs))
        strongest = int(log_P.argmax())
        block = _connected(
            self._pairs[strongest],
            [self._pairs[p] for p in np.flatnonzero(log_P >= _SUSPICIOUS * log_P[strongest])],
        )
        age = self._test.steps_since(strongest, 0, BetKind.UP)
        members = [index for index, pair in enumerate(self._pairs) if block.issuperset(pair)]
        odd = self._test.minority(members, 0, age)
        involved = {worker for index in odd or () for worker in self._pairs[index]}
        self._many = self._many or odd is None or 2 * len(involved) >= self._num_workers
        if self._span.count == 0:
            self._span.first = self._test.onset(strongest, 0, BetKind.UP)
            self._span.count = max(1, gathered.step - self._span.first)
        flagged = self._test.flagged
        for index, pair in enumerate(self._pairs):
            if block.issuperset(pair) and index not in flagged:
                self._test.flag(index)
                self._active.add(index)
        self._ranks |= block
        self._span.last = gathered.step

    def _follow(self, step: int) -> bool:
        """Add a step and release healed pairs; return whether to report it."""
        if not self._active:
            return False
        self._span.count += 1
        certain = {pair: self._test.certainty(pair) for pair in self._active}
        if max(certain.values()) >= 1:
            self._span.last = step
        if max(certain.values()) > HEALED:
            return self._span.count >= 2 * self._count_reported
        self._measure()
        for pair in self._active:  # a block heals as a whole
            self._test.release(pair)
        self._active = set()
        return True

    def _evidence(self) -> FaultEvidence:
        self._count_reported = self._span.count
        self._measure()
        ranks = tuple(sorted(self._ranks))
        many = self._many or 2 * len(ranks) >= self._num_workers
        self._span.open = bool(self._active)
        return self._span.evidence(
            "data.overlapping_shards",
            Severity.NOTE if many else Severity.WARNING,
            ranks,
            {
                "above": f"{self._excess:+.2f}".replace("-", "−"),
                "steps": count(self._steps, "step"),
                "bound": bound_in_words(self._steps),
            },
            {
                "cosine_above_other_pairs": self._excess,
                "steps_compared": self._steps,
                "false_alarm_probability": false_alarm_bound(self._steps),
            },
            key=KEY,
        )

    def _measure(self) -> None:
        """Measure by how much the pairs' cosine exceeds the median, over the steps that show it."""
        last = self._span.last
        since = last - self._span.first + 1
        traces = [self._test.traces(pair, since=since, last=last)[:1] for pair in self._active]
        deviations = [trace.deviation for found in traces for trace in found]
        if deviations:
            self._excess = float(np.median(deviations))


def _connected(start: Pair, pairs: Iterable[Pair]) -> set[int]:
    """Return the workers that pairs link to the first pair."""
    block = set(start)
    rest = list(pairs)
    while linked := [pair for pair in rest if block & set(pair)]:
        block.update(*linked)
        rest = [pair for pair in rest if not block & set(pair)]
    return block
