"""The detector of an order of batches that comes again in each epoch.

A sampler without ``set_epoch`` deals the same batches in the same order in each epoch. No worker
differs from another then, and no metric of a single step shows it.
"""

from collections.abc import Iterable

from rankscope.bus.detector import FaultEvidence, PersistentFault, RestartDetector
from rankscope.bus.finding import Severity
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.evidence.samples.repeats import FEW
from rankscope.stats.arrays import MISSING_INT
from rankscope.stats.state import Stateful


class PeriodFinder(Stateful):
    """Counts steps in a row whose batches came before, all ``period`` steps ago.

    ``run`` is the number of these steps, from ``first`` on; 0 if the last one's did not.
    """

    def __init__(self) -> None:
        self._earliest = 0
        self.period = 0
        self.run = 0
        self.first = -1

    def restart(self, step: int) -> None:
        """Compare with no step before this one from now on."""
        self._earliest = step
        self.period = self.run = 0

    def observe(self, step: int, before: int) -> None:
        """Process a step, in order; ``before`` is the latest one with the same batches, or -1."""
        if before < self._earliest:
            self.period = self.run = 0
        elif step - before == self.period:
            self.run += 1
        else:
            self.period = step - before
            self.run = 1
            self.first = step


_LEAST_STEPS = 8
_SHARE = 4  # of a period must have come again
_SHUFFLE = {
    "nothing": "The sampler does not shuffle. If it should, let it (shuffle=True), and call "
    "set_epoch(epoch) before each epoch where it has that method.",
    "set_epoch": "Call set_epoch(epoch) before each epoch on what shuffles: the sampler, the batch "
    "sampler or the data set.",
    "generator": "The sampler's generator begins each epoch from the same state: seed it once, "
    "before the first epoch. The sampler has no set_epoch.",
}
_SHUFFLE_SOMEHOW = (
    "Where something shuffles, call its set_epoch(epoch) before each epoch, or do not seed its "
    "generator anew. Where nothing does, shuffle the data."
)


class RepeatedOrder(RestartDetector):
    """The batches of all workers come again in the same order.

    A step's batch is identified by the digests of all workers' batches in the order of ranks. It
    must have come before with one constant period, in 8 steps in a row and in a quarter of the
    period. So a single batch that comes twice proves nothing. Exact for periods up to 2^19 steps.

    Steps are not compared across a restart: a job that begins again from an older checkpoint
    repeats some of them, as it should.
    """

    SETTINGS = ("_intended", "_order")

    def __init__(self, *, repeats: bool = False, order: str = "") -> None:
        super().__init__()
        self._intended = repeats
        self._order = order
        self._finder = PeriodFinder()
        self._on_purpose = 0
        self._span = PersistentFault()
        self._period = -1
        self._severity = Severity.NOTE

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's batches; report while they come again in the same order."""
        gathered = step.gathered
        digests_W = gathered.workers["batch_digest"]
        if self._restarts():
            self._on_purpose = 0
            self._finder.restart(gathered.step)
        if not step.some_known("batch_digest"):
            return ()
        ages_W = step.recurrence.ages_W
        again_W = ((ages_W > 0) & (ages_W < FEW)) | (digests_W == MISSING_INT)
        self._on_purpose = self._on_purpose + 1 if again_W.all() else 0
        finder = self._finder
        finder.observe(gathered.step, step.recurrence.before)
        if finder.run < max(_LEAST_STEPS, finder.period / _SHARE):
            return ()
        few = finder.period < FEW or self._on_purpose >= finder.run
        severity = Severity.NOTE if few or self._intended else Severity.WARNING
        if not self._span.count or severity > self._severity:
            self._span = PersistentFault()
            self._period = finder.period
            self._severity = severity
        self._span.see(gathered.step, first=finder.first, before=finder.run - 1)
        return (self._evidence(),)

    def _evidence(self) -> FaultEvidence:
        span = self._span
        return span.evidence(
            "data.repeated_order",
            self._severity,
            (),
            {
                "before": f"{span.first - self._period:,}",
                "period": count(self._period, "step"),
                "Shuffle": _SHUFFLE.get(self._order, _SHUFFLE_SOMEHOW),
            },
            {"period": self._period, "repeated_steps": span.count},
        )
