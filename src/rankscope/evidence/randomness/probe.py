"""Finds the random generators that a step moves, and their states at its start."""

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd
from rankscope.evidence.randomness.meter import LoaderMeter, RandomMeter
from rankscope.evidence.randomness.private import PrivateRandomMeter


class RandomnessProbe(Probe):
    """Collects fingerprints of one worker's random generators.

    Args:
        shared: Reads the global generators.
        private: Reads those of modules and data sets.
        loader: Reads those of data-loader workers.
    """

    def __init__(
        self, shared: RandomMeter, private: PrivateRandomMeter, loader: LoaderMeter
    ) -> None:
        self._shared = shared
        self._private = private
        self._loader = loader

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the generators before the step's first forward pass."""
        if first:
            self._shared.before_forward()
            self._private.before_forward()

    def after_forward(self) -> None:
        """Find those that have moved."""
        self._shared.after_forward()

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the fingerprints of a step after which workers are comparable."""
        values = {**self._shared.collect(), **self._private.collect()}
        if not end.comparable:
            return None
        return Ready(MessagePart({**values, **self._loader.collect()}))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._shared.collect()
        self._private.collect()

    def close(self) -> None:
        """Give the data loader its own function back."""
        self._loader.remove()


def make_probe(job: Job) -> RandomnessProbe | None:
    """Return the probe of generators; None where they are not compared."""
    if not job.exact:
        return None
    wrapped = job.wrapped
    private = PrivateRandomMeter(wrapped.module, job.loader)
    return RandomnessProbe(RandomMeter(wrapped.device), private, LoaderMeter(job.loader))
