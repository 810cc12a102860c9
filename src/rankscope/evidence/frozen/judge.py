"""The detector of frozen modules that differ between workers."""

from collections.abc import Iterable

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind, known_values, minority_ranks
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import SharedWork, Step
from rankscope.bus.words import shortened
from rankscope.evidence.frozen import KEY

CAUSE = "state.frozen_differ"


class FrozenDiffer(Detector):
    """Frozen modules outside of the watched model whose parameters differ between workers.

    A module that some worker does not have is not compared, nor are workers that share the work on
    each sample: they may hold parts of it.
    """

    def __init__(self) -> None:
        self._fault = PersistentFault()
        self._names: list[str] = []
        self._sharing = SharedWork()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what differs in it."""
        sharing = self._sharing.observe(step)
        rows = step.gathered.differences
        held = held_values(rows, StateKind.STARTED, KEY) if rows and not sharing else {}
        odd: set[int] = set()
        for name, digests_W in held.items():
            if (digests_W != MISSING_INT).all():
                ranks = minority_ranks(known_values(digests_W, digests_W != MISSING_INT))
                self._names += [name] if ranks and name not in self._names else []
                odd.update(ranks)
        if odd:
            self._fault.see(step.gathered.step, odd)
            yield self._fault.evidence(
                CAUSE,
                Severity.WARNING,
                self._fault.ranks,
                {"names": shortened(self._names, 3)},
                {"steps": self._fault.count, "names": self._names[:64]},
            )


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detector of a run."""
    return (FrozenDiffer(),) if run.num_workers > 1 else ()
