"""Where the time of a step goes on one worker."""

from functools import partial
from typing import Any

from rankscope.bus.probe import Awaited, Job, MessagePart, Pending, Probe, StepEnd


class TimingProbe(Probe):
    """Collects the times that the collector measures."""

    def collect(self, end: StepEnd) -> Pending:
        """Return the step's times; accelerator overhead may still be on the device."""
        names = ("step_seconds", "busy_seconds", "overhead_seconds", "read_seconds")
        values = {name: getattr(end, name) for name in names}
        return Awaited([end.device_overhead], partial(_read, values, end.device_overhead))


def _read(values: dict[str, float], device_overhead: Any) -> MessagePart:
    if device_overhead is None:
        return MessagePart(values)
    return MessagePart({**values, "overhead_seconds": device_overhead.read()})


def make_probe(job: Job) -> TimingProbe:
    """Return the probe of times."""
    return TimingProbe()
