"""The detector of models that are trained, not watched, and differ between workers."""

from collections.abc import Iterable

from rankscope.bus.detector import Detector, FaultEvidence, RunFacts, evidence_at
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind, minority_ranks
from rankscope.bus.steps import Step
from rankscope.evidence.joined import BEGINS, INSIDE, KEY
from rankscope.stats.arrays import MISSING_INT

DIFFERS = "state.unwatched_differs"


class OutsideModels(Detector):
    """Parameters that some other optimizer updates, and of which workers hold different values.

    They are compared once, after eight of its calls: nothing has reduced their gradients. Where
    they differed before the first call, each worker may be meant to have its own.
    """

    def __init__(self) -> None:
        self._apart: set[str] = set()  # those that differed before the first call

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report those that differ."""
        rows = step.gathered.differences
        held = held_values(rows, StateKind.OUTSIDE, KEY) if rows else {}
        for names, values_W in held.items():
            if (values_W == MISSING_INT).any() or (values_W == values_W[0]).all():
                continue
            if names.endswith(BEGINS):
                self._apart.add(names.removesuffix(BEGINS))
                continue
            ranks = minority_ranks(values_W.tolist())
            inside = names.endswith(INSIDE)
            fields = {"names": names.removesuffix(INSIDE), "where": _INSIDE if inside else _OUTSIDE}
            check = _WRAP_AFTER if inside else _WRAP_IT
            key = f"{DIFFERS}:{fields['names']}"
            number = step.gathered.step
            severity = Severity.NOTE if names in self._apart else Severity.WARNING
            numbers = {"names": fields["names"]}
            fields["check"] = check
            yield evidence_at(number, DIFFERS, severity, ranks, fields, numbers, key=key)


_OUTSIDE = "are in no watched model"
_INSIDE = "are in the watched model, and its wrapper leaves them alone"
_WRAP_IT = "Wrap that model as well, all of it"
_WRAP_AFTER = "Call fully_shard for the model itself, once its adapters are in it"


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return () if run.plan.local_steps else (OutsideModels(),)
