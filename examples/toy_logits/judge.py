"""Judges the largest logits of all workers, at the root."""

from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.steps import Step

LIMIT = 1000.0


class HotLogits(Detector):
    """Finds workers whose logits are above the limit."""

    def __init__(self) -> None:
        self._fault = PersistentFault(1)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Look at one step of all workers."""
        hot = np.flatnonzero(step.gathered.workers["logit_max"] > LIMIT).tolist()
        if not self._fault.observe(step.gathered.step, hot):
            return ()
        numbers = {"steps": self._fault.count}
        ranks = self._fault.ranks
        return (self._fault.evidence("toy.hot_logits", Severity.WARNING, ranks, {}, numbers),)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the judges of a run."""
    return (HotLogits(),)
