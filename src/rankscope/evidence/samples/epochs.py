"""The detectors of an epoch's end: padding, and epochs that leave samples out since a restart.

Samples that a sampler repeats at an epoch's end, so that all workers have equally many, are no
fault. They explain repeats in the record.
"""

from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import (
    FaultEvidence,
    PersistentFault,
    RestartDetector,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.draws import SampleShare, SortedMap, count_common, in_order
from rankscope.stats.samples import SampleCounts
from rankscope.stats.state import Stateful

KEY = "epochs-cut-short"

_LEAST_DRAWS = 3  # of each sample, on average
_EVEN = 1
_UNEVEN = 3
_LEFT_OUT = 0.25  # of an epoch, at random
_OTHERS = 0.02  # of all draws
_CHECKS = 4  # in an epoch


class EpochsCutShort(RestartDetector):
    """Samples that were drawn equally often before a restart, and are not since.

    Whole epochs draw each sample once. At any time, the numbers of draws of two samples differ by
    one, and by two after a restart inside an epoch. An epoch that leaves out the share p of its
    samples at random draws each of them ``(1 - p) E`` times in E epochs, with a variance of p times
    that. Samplers leave out what does not fill a batch, so only a share of a quarter counts.
    """

    SETTINGS = ("_capacity", "_intended")

    def __init__(self, *, repeats: bool = False, capacity: int = 1 << 16) -> None:
        super().__init__()
        self._intended = repeats
        self._capacity = capacity
        self._share = SampleShare()
        self._draws = SortedMap(np.int32)  # of each sample, since the restart if there was one
        self._whole = False  # whether epochs were whole before the restart
        self._begun_at = -1
        self._since = 0  # draws since the last check
        self._total = self._others = 0  # draws since the restart; of samples not seen before
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's samples; report once that epochs are whole no more."""
        if self._intended or self._span.count:
            return ()
        if self._restarts():
            self._begin_job(step.gathered.step)
        samples = np.concatenate([*step.gathered.samples, np.empty(0, np.int64)])
        self._add(samples[self._share.admits(samples)])
        if not self._whole or self._since * _CHECKS < len(self._draws):
            return ()
        self._since = 0
        draws_U = self._draws.values()
        low, high = _ends(draws_U)
        random = draws_U.var() >= _LEFT_OUT * draws_U.mean()
        enough = draws_U.mean() >= _LEAST_DRAWS and self._others <= _OTHERS * self._total
        if not (enough and random and high - low >= _UNEVEN):
            return ()
        self._span.see(step.gathered.step, first=self._begun_at)
        return (self._evidence(len(draws_U), low, high),)

    def _begin_job(self, step: int) -> None:
        draws_U = self._draws.values()
        if len(draws_U) and draws_U.mean() >= _LEAST_DRAWS:
            low, high = _ends(draws_U)
            self._whole = self._whole or high - low <= _EVEN
        if self._whole:
            self._draws.fill(0)
        self._begun_at = step
        self._since = self._total = self._others = 0

    def _add(self, samples: Ints) -> None:
        samples_U, draws_U = np.unique(samples, return_counts=True)
        known_U, before_U = self._draws.find(samples_U)
        self._since += len(samples)
        self._total += len(samples)
        if self._whole:
            self._others += int(draws_U[~known_U].sum())
            self._draws.replace(samples_U[known_U], (before_U + draws_U)[known_U])
            return
        self._draws.put(samples_U, before_U + draws_U)
        while len(self._draws) > self._capacity and self._share.can_halve:
            self._share.halve()
            self._draws.keep(self._share.admits)

    def _evidence(self, followed: int, low: int, high: int) -> FaultEvidence:
        number = round(self._share.scale_up(followed)[0])
        fields = {
            "restart": f"{self._begun_at:,}",
            "samples": count(number, "sample"),
            "low": f"{low:,}",
            "high": f"{high:,}",
        }
        numbers = {
            "restart_at": self._begun_at,
            "samples": number,
            "drawn_by_a_tenth_at_most": low,
            "drawn_by_a_tenth_at_least": high,
            "follows_one_sample_in": self._share.one_in,
        }
        cause = "data.resume_mismatch"
        return self._span.evidence(cause, Severity.WARNING, (), fields, numbers, key=KEY)


def _ends(draws_U: Ints | Floats) -> tuple[int, int]:
    """Return the numbers of draws between which the middle 80 % of the samples are."""
    low, high = np.quantile(draws_U, [0.1, 0.9], method="nearest")
    return int(low), int(high)


PADDING = "padding-duplicates"

_NONE = np.empty(0, np.int64)


class Padding(Stateful):
    """Detects padding at the end of the first epoch, where repeats begin.

    A step with some new samples and a few repeats is padded if no step before it repeats any, the
    next one draws nothing new, so a new epoch has begun, and the repeats are fewer than workers,
    or all come from the epoch's first step.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._start = _NONE
        self._looking = num_workers > 1
        self._repeats = 0
        self._step = -1

    def observe(self, step: int, counts: SampleCounts, samples: Ints) -> Iterable[FaultEvidence]:
        """Process a step's samples and their counts; report once, after the first epoch's end."""
        if not self._looking or not counts.drawn:
            return ()
        if self._repeats:
            found = () if counts.new else self.end_epoch()
            self._looking = False
            self._start = _NONE
            return found
        repeats = counts.drawn - counts.new
        if repeats:
            few = repeats < self._num_workers
            of_the_start = count_common(samples, self._start) == repeats
            self._looking = counts.new > 0 and (few or of_the_start)
            self._repeats = repeats
            self._step = step
        if not len(self._start):
            self._start = in_order(samples)
        return ()

    def end_epoch(self) -> Iterable[FaultEvidence]:
        """Report the padding of the last step, if any: a new epoch has begun."""
        padded = self._looking and self._repeats > 0
        self._looking = self._looking and not padded
        return (self._evidence(),) if padded else ()

    def _evidence(self) -> FaultEvidence:
        fields = {"step": f"{self._step:,}", "repeats": count(self._repeats, "sample")}
        numbers = {"repeated": self._repeats}
        cause = "data.overlapping_shards"
        return evidence_at(self._step, cause, Severity.NOTE, (), fields, numbers, key=PADDING)
