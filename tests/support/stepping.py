"""Feeds detectors of exact evidence with steps that are given by their columns."""

import json
from weakref import WeakKeyDictionary

import numpy as np

from rankscope.agent.assembly import summarize
from rankscope.agent.step_message import StepMessage
from rankscope.bus.detector import RunFacts, finding_of
from rankscope.bus.plan import Plan
from rankscope.bus.step import StepReport
from rankscope.bus.steps import RecentBatches, batches_of
from rankscope.verdict.diagnosis import Diagnosis
from support.streams import gathered

AT_ONCE = 64
"""Steps that are handed over together, as agents do when there are many; the test of
``verdict/test_restart.py`` is that this tells what steps do that come one by one."""

_MEMORIES = WeakKeyDictionary()


def events_of(diagnosis, reports):
    reports = list(reports)
    return [
        event
        for first in range(0, len(reports), AT_ONCE)
        for events in diagnosis.observe_many(reports[first : first + AT_ONCE])
        for event in events
    ]


def findings_of(cause, steps, plan=None):
    steps = list(steps)
    diagnosis = Diagnosis(RunFacts(steps[0].num_workers, plan=plan or Plan()))
    told = [finding for step in steps for finding in diagnosis.observe(summarize(step))]
    return [finding for finding in told if finding.cause == cause]


def told_of(detector, reports, memory=None):
    """Return what a detector finds in each step.

    Without a ``memory``, the batches of earlier calls with this detector are remembered.
    """
    told = []
    for first in range(0, len(reports), AT_ONCE):
        together = reports[first : first + AT_ONCE]
        width = together[0].gathered.num_workers
        batches = memory or _MEMORIES.setdefault(detector, RecentBatches(width))
        told += [
            list(found)
            for steps in batches_of(together, batches)
            for found in detector.observe(steps)
        ]
    return told


def evidence_of(detector, *reports, memory=None):
    return [one for told in told_of(detector, reports, memory) for one in told]


def observe(detector, step, width=4, **columns):
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


def named_message(step, names):
    """Return what a rank sends of a step beside numbers: names, which may be none."""
    packed = json.dumps(names).encode() if names else b""
    return StepMessage(step, names=np.frombuffer(packed, np.uint8))


def describe(evidence):
    finding = finding_of(evidence, evidence.last_step)
    return finding.explanation, finding.next_check


def words(evidence):
    return " ".join(describe(evidence))
