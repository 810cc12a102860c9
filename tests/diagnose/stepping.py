"""Feeds detectors of exact evidence with steps that are given by their columns."""

import numpy as np

from diagnose.streams import gathered
from rankscope.core.step import StepReport
from rankscope.diagnose.evidence import Observation
from rankscope.diagnose.rules import RULES, describe


def observe(detector, step, width=4, **columns):
    """Return what a detector says of one step in which workers report these columns."""
    columns = {"num_samples": [2] * width, **columns}
    samples = [np.array([100 * step + rank]) for rank in range(width)]
    return list(detector.observe(Observation(StepReport(gathered(step, samples, **columns), {}))))


def run(detector, num_steps, start=0, **columns):
    """Return all that a detector says of steps that are alike."""
    return [
        evidence
        for step in range(start, start + num_steps)
        for evidence in observe(detector, step, **columns)
    ]


def words(evidence):
    """Return explanation and next check as one text."""
    rule = evidence.key if evidence.key in RULES else evidence.cause
    return " ".join(describe(rule, evidence.severity, evidence.fields))
