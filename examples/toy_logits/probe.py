"""Measures the largest logit of a step, in the training process."""

from collections.abc import Mapping
from typing import Any

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd


class Logits(Probe):
    """Keeps the largest magnitude of the step's outputs."""

    largest = 0.0

    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int) -> None:
        """Read the output of a forward pass."""
        self.largest = max(self.largest, float(output.detach().abs().max()))

    def collect(self, end: StepEnd) -> Ready:
        """Return what the step's message takes along."""
        largest, self.largest = self.largest, 0.0
        return Ready(MessagePart({"logit_max": largest}))


def make_probe(job: Job) -> Logits:
    """Return the probe of one worker."""
    return Logits()
