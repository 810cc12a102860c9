"""Finds the random generators that a step moves, and their states at its start."""

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.evidence.randomness import KEY
from rankscope.evidence.randomness.meter import LoaderMeter, PrivateRandomMeter, RandomMeter


class RandomnessProbe(Probe):
    """Collects fingerprints of one worker's random generators."""

    def __init__(
        self, shared: RandomMeter, private: PrivateRandomMeter, loader: LoaderMeter
    ) -> None:
        self._shared = shared
        self._private = private
        self._loader = loader
        self._begun = False
        self._held: dict[str, dict[str, int]] = {}  # at the session's start, and where it saves

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the generators before the step's first forward pass."""
        if not self._begun:
            self._begun = True
            self._hold(StateKind.STARTED)
        if first:
            self._shared.before_forward()
            self._private.before_forward()

    def after_forward(self) -> None:
        """Find those that have moved."""
        self._shared.after_forward()

    def see_saved(self) -> None:
        """Read what a checkpoint would hold."""
        self._hold(StateKind.SAVED)

    def _hold(self, kind: StateKind) -> None:
        self._held[kind] = {**self._shared.held(), **self._private.held()}

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the fingerprints of a step after which workers are comparable."""
        values = {**self._shared.collect(), **self._private.collect()}
        held, self._held = self._held, {}
        if not end.comparable:
            return None
        names = {KEY: held} if held else {}
        return Ready(MessagePart({**values, **self._loader.collect()}, names=names))

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
