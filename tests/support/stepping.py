"""Feeds detectors of exact evidence with steps that are given by their columns."""

from weakref import WeakKeyDictionary

import numpy as np

from rankscope.bus.rules import finding_of
from rankscope.bus.step import StepReport
from rankscope.bus.steps import RecentBatches, StepBatch
from support.streams import gathered

_MEMORIES = WeakKeyDictionary()


def evidence_of(detector, *reports, memory=None):
    """Return what a detector finds in steps that it is given one at a time.

    Without a ``memory``, the batches of earlier calls with this detector are remembered.
    """
    found = []
    for report in reports:
        width = report.gathered.num_workers
        batches = memory or _MEMORIES.setdefault(detector, RecentBatches(width))
        found += [one for told in detector.observe(StepBatch([report], batches)) for one in told]
    return found


def observe(detector, step, width=4, **columns):
    """Return what a detector says of one step in which workers report these columns."""
    columns = {"num_samples": [2] * width, **columns}
    samples = [np.array([100 * step + rank]) for rank in range(width)]
    return evidence_of(detector, StepReport(gathered(step, samples, **columns), {}))


def run(detector, num_steps, start=0, **columns):
    """Return all that a detector says of steps that are alike."""
    return [
        evidence
        for step in range(start, start + num_steps)
        for evidence in observe(detector, step, **columns)
    ]


def describe(evidence):
    """Return explanation and next check."""
    finding = finding_of(evidence, evidence.last_step)
    return finding.explanation, finding.next_check


def words(evidence):
    """Return explanation and next check as one text."""
    return " ".join(describe(evidence))
