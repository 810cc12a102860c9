"""The optimizer's settings and the precision of the forward pass, step by step."""

import math
from collections.abc import Mapping
from typing import Any

from rankscope.bus.probe import Evaluated, Job, MessagePart, Probe, Ready, StepEnd
from rankscope.evidence.environment.facts import PrecisionMeter
from rankscope.evidence.environment.modes import ModeMeter
from rankscope.evidence.environment.optimizer import OptimizerMeter


class EnvironmentProbe(Probe):
    """Collects settings, precision and modes of one worker's steps.

    ``precisions`` and ``modes`` are None where these are not compared.
    """

    def __init__(
        self,
        optimizer: OptimizerMeter,
        precisions: PrecisionMeter | None,
        modes: ModeMeter | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._precisions = precisions
        self._modes = modes
        self._precision = math.nan
        self._step = 0

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note the step's number."""
        self._step = step

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read precision and modes of the step's first forward pass; later ones are the same."""
        self._optimizer.see_pass(first=first)
        if first and self._precisions is not None:
            self._precision = self._precisions.code(step)
        if first and self._modes is not None:
            self._modes.read(step)

    def on_evaluation(self, output: Any, kwargs: Mapping[str, Any]) -> Evaluated | None:
        """Read the modes once this pass in evaluation mode proves to be trained on."""
        return None if self._modes is None else Evaluated(lambda: None, self._begin_evaluated)

    def _begin_evaluated(self, forward: int) -> None:
        if not forward and self._modes is not None:
            self._modes.read(self._step)

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Count the call, and read the settings."""
        self._optimizer.count(optimizer)

    def collect(self, end: StepEnd) -> Ready:
        """Return settings, calls and precision."""
        values = self._optimizer.collect()
        names: dict[str, Any] = dict(self._optimizer.named())
        if end.comparable:
            values["precision"] = self._precision
        if self._modes is not None:
            columns, modes = self._modes.collect()
            values |= columns
            names |= modes
        return Ready(MessagePart(values, names=names))


def make_probe(job: Job) -> EnvironmentProbe:
    """Return the probe of settings."""
    wrapped = job.wrapped
    precisions = PrecisionMeter(wrapped.module, wrapped.device) if job.exact else None
    modes = ModeMeter(wrapped.module) if job.exact else None
    return EnvironmentProbe(
        OptimizerMeter(job.optimizer, wrapped.parameters.values()), precisions, modes
    )
