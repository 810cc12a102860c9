"""The optimizer's settings and the precision of the forward pass, step by step."""

import math
from typing import Any

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd
from rankscope.evidence.environment.facts import PrecisionMeter
from rankscope.evidence.environment.optimizer import OptimizerMeter


class EnvironmentProbe(Probe):
    """Collects settings and precision of one worker's steps.

    ``precisions`` is None where the precision is not compared.
    """

    def __init__(self, optimizer: OptimizerMeter, precisions: PrecisionMeter | None) -> None:
        self._optimizer = optimizer
        self._precisions = precisions
        self._precision = math.nan

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the precision of the step's first forward pass; later ones are the same."""
        if first and self._precisions is not None:
            self._precision = self._precisions.code(step)

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Count the call, and read the settings."""
        self._optimizer.count(optimizer)

    def collect(self, end: StepEnd) -> Ready:
        """Return settings, calls and precision."""
        values = self._optimizer.collect()
        if end.comparable:
            values["precision"] = self._precision
        return Ready(MessagePart(values))


def make_probe(job: Job) -> EnvironmentProbe:
    """Return the probe of settings."""
    wrapped = job.wrapped
    precisions = PrecisionMeter(wrapped.module, wrapped.device) if job.exact else None
    return EnvironmentProbe(OptimizerMeter(job.optimizer), precisions)
