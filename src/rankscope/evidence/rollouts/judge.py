"""Rollouts whose log-probabilities are not the trainer's (reinforcement learning).

An engine that holds the trainer's weights still differs by its kernels and its precision: vLLM in
bf16 by 0.010 to 0.018 nats per token, and by 0.2 after its weights went stale at a high learning
rate (huggingface/trl#5312). Workers are compared like in other signals, with three differences.
Small gaps count as none. A gap below three times the usual one counts as the usual: data of other
entropy have another gap. And only a large gap is wrong, so even of two workers the one at fault is
known.

Legend of shapes: W workers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, RunFacts
from rankscope.bus.evidence import Compares
from rankscope.bus.finding import Severity
from rankscope.bus.steps import Step
from rankscope.evidence.outliers.blame import Fault, OutlierSearch
from rankscope.evidence.outliers.parts import Levelled, total_signals
from rankscope.stats.arrays import Bools, Floats
from rankscope.stats.bets import ROLLOUTS

COLUMN = "rollout_gap"

FACTOR = 3.0
"""Times the usual gap of a step from which a worker's gap counts as different."""

LEAST = 0.01
"""Nats per token below which a gap counts as none: engines with the right weights have as much."""

GROSS = 0.1
"""Nats per token from which a gap is gross on any worker.

It is a ratio of probabilities of 1.1: twice what NeMo RL accepts of an engine of the trainer's own
precision without an investigation (a mean ratio of 1.05; docs/adding-new-models.md there).
"""

_STEPS_NEEDED = 4
_KEPT = 0.8  # of the mean gap, from one step that has one to the next


class DifferentRollouts(OutlierSearch):
    """Finds workers whose rollouts do not come from their trainer's weights."""

    FAMILY = ROLLOUTS
    SHARE = 1.0
    KEY = "rollout"
    TIE = "rollouts-differ"
    SETTINGS = (*OutlierSearch.SETTINGS, "_gaps")

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        self._gaps = Levelled(num_workers, total_signals(Compares.ROLLOUTS))
        super().__init__(num_workers, self._gaps, hosts)
        self._mean_W = np.full(num_workers, np.nan)
        self._reported: dict[str, tuple[list[int], float, float]] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report faults that begin, change, grow or heal."""
        gaps_W = step.gathered.workers[COLUMN]
        known_W = np.isfinite(gaps_W)
        if np.count_nonzero(known_W) < 2:
            return ()
        self._steps += 1
        mean_W = np.where(np.isnan(self._mean_W), gaps_W, self._mean_W)
        self._mean_W = np.where(known_W, _KEPT * mean_W + (1 - _KEPT) * gaps_W, mean_W)
        usable_W = known_W & (step.recurrence.ages_W == 0)
        values_W = level(np.where(usable_W, gaps_W, np.nan))
        different = bool(np.nanmax(values_W, initial=0) > np.nanmin(values_W, initial=np.inf))
        self._gaps.see(values_W[None], usable_W, step.gathered.step, different=different)
        return self._find(step.gathered)

    def _evidence(self, fault: Fault) -> FaultEvidence:
        ranks, gap, others = words = self._words(fault)
        reported = self._reported.get(fault.key)
        if (
            reported is None
            or gap > reported[1]
            or (fault.is_open and set(ranks) > set(reported[0]))
        ):
            self._reported[fault.key] = words
        ranks, gap, others = self._reported[fault.key]
        evidence = super()._evidence(fault)
        usual = {name: evidence.fields[name] for name in ("host", "steps", "bound")}
        one = self._num_workers - len(ranks) == 1
        theirs = "those of the other worker" if one else "those of the other workers"
        own = {"gap": f"{gap:.2g}", "theirs": theirs, "others": f"{others:.2g}"}
        return replace(  # which fills in the names of the ranks
            evidence,
            cause="rollout.worker_outlier",
            ranks=tuple(ranks),
            fields={**usual, **own},
            numbers={**evidence.numbers, "gap": gap, "others": others},
        )

    def _words(self, fault: Fault) -> tuple[list[int], float, float]:
        """Return the ranks with too large a gap, their smallest gap, and the others' largest."""
        far_W = np.isin(np.arange(self._num_workers), fault.ranks)
        if fault.tie:
            far_W = self._mean_W >= max(LEAST, FACTOR * np.nanmin(self._mean_W))
        if not far_W.any() or far_W.all():
            far_W = np.arange(self._num_workers) == np.nanargmax(self._mean_W)
        far = self._mean_W[far_W]
        near = self._mean_W[~far_W]
        return np.flatnonzero(far_W).tolist(), float(np.nanmin(far)), float(np.nanmax(near))


class GrossRollouts(Detector):
    """Detects gaps that are gross on all workers alike, which no comparison shows."""

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._seen = PersistentFault(_STEPS_NEEDED, in_a_row=True)
        self._smallest = 0.0

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report gross gaps, and their end."""
        gaps_W: Floats = step.gathered.workers[COLUMN]
        known_W = np.isfinite(gaps_W)
        if not known_W.any():
            return ()
        smallest = float(gaps_W[known_W].min())
        gross = smallest >= GROSS
        if not self._seen.observe(step.gathered.step, range(self._num_workers) if gross else ()):
            return ()
        if gross:
            self._smallest = smallest
        fields = {"gap": f"{self._smallest:.2g}", "limit": f"{GROSS:g}"}
        numbers = {"smallest_gap": self._smallest, "gross_from": GROSS}
        ranks = range(self._num_workers)
        return [self._seen.evidence("rollout.gap", Severity.NOTE, ranks, fields, numbers)]


def level(gaps_W: Floats) -> Floats:
    """Return the gaps of a step, each that does not count as different as the usual one.

    The usual one is the lower median: of two workers, the smaller gap. No rank is treated apart,
    so the workers remain exchangeable.

    >>> level(np.array([0.012, 0.015, 0.011, 0.2])).tolist()
    [0.012, 0.012, 0.012, 0.2]
    >>> level(np.array([1e-7, 3e-7])).tolist()
    [1e-07, 1e-07]
    """
    known_W: Bools = np.isfinite(gaps_W)
    ordered = np.sort(gaps_W[known_W])
    if not len(ordered):
        return gaps_W
    usual = float(ordered[(len(ordered) - 1) // 2])
    near_W = known_W & (gaps_W < max(LEAST, FACTOR * usual))
    return np.where(near_W, usual, gaps_W)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        DifferentRollouts(run.num_workers, run.hosts),
        GrossRollouts(run.num_workers),
    )
