"""Where the time of a step goes on one worker."""

from dataclasses import dataclass
from typing import Any

from rankscope.bus.probe import Job, MessagePart, Probe, StepEnd


@dataclass(frozen=True, slots=True)
class PendingTimes:
    """The times of one step by column; accelerator overhead may still be on the device."""

    values: dict[str, float]
    device_overhead: Any

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self.device_overhead is None or bool(self.device_overhead.ready)

    def read(self) -> MessagePart:
        """Wait for the device."""
        if self.device_overhead is None:
            return MessagePart(self.values)
        return MessagePart({**self.values, "overhead_seconds": self.device_overhead.read()})


class TimingProbe(Probe):
    """Collects the times that the collector measures."""

    def collect(self, end: StepEnd) -> PendingTimes:
        """Return the step's times."""
        names = ("step_seconds", "busy_seconds", "overhead_seconds", "read_seconds")
        return PendingTimes({name: getattr(end, name) for name in names}, end.device_overhead)


def make_probe(job: Job) -> TimingProbe:
    """Return the probe of times."""
    return TimingProbe()
