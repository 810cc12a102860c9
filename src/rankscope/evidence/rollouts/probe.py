"""The gap between trainer and rollout log-probabilities, which the training provides."""

from rankscope.bus.probe import Job, Pending, Probe, StepEnd
from rankscope.evidence.rollouts.meter import RolloutMeter


class RolloutProbe(Probe):
    """Collects the gap of one worker's steps."""

    def __init__(self) -> None:
        self._meter = RolloutMeter()
        self.give = self._meter.give

    def collect(self, end: StepEnd) -> Pending | None:
        """Return the step's gap, if log-probabilities were given."""
        return self._meter.collect()

    def abort(self) -> None:
        """Forget the values given so far."""
        self._meter.collect()


def make_probe(job: Job) -> RolloutProbe:
    """Return the probe of gaps."""
    return RolloutProbe()
