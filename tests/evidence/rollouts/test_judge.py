"""Gaps between trainer and rollout: whose are other ones, and which are gross on all workers."""

import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.rollouts.judge import DifferentRollouts
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import evidence_of
from support.streams import gathered

NO_SAMPLES = np.empty(0, np.int64)
FIRST = 100


def report(step, gaps_W):
    samples = [NO_SAMPLES] * len(gaps_W)
    return StepReport(gathered(step, samples, None, rollout_gap=gaps_W), {})


def engines(width, *, size=0.013, spread=0.3, seed=0):
    """Yield gaps as engines in bf16 have them: each step's tokens differ."""
    rng = np.random.default_rng(seed)
    while True:
        yield size * np.exp(spread * rng.standard_normal(width))


def told_of(detector, stream, steps, changed=lambda step, gaps_W: gaps_W, first=0):
    told = []
    for step in range(first, first + steps):
        gaps_W = changed(step, next(stream))
        told += evidence_of(detector, report(step, gaps_W))
    return told


def stale(workers, gap=0.2):
    """Return what lets workers have a large gap from a step on."""

    def changed(step, gaps_W):
        if step >= FIRST:
            gaps_W[workers] *= gap / 0.013
        return gaps_W

    return changed


@pytest.mark.parametrize("width", [2, 8])
def test_a_worker_with_stale_weights_is_named_within_40_steps(width):
    detector, stream = DifferentRollouts(width), engines(width)
    assert told_of(detector, stream, FIRST, stale([1])) == []
    told = told_of(detector, stream, 40, stale([1]), first=FIRST)
    assert {(one.cause, one.ranks) for one in told} == {("rollout.worker_outlier", (1,))}
    assert told[0].severity is Severity.WARNING
    assert told[0].first_step == FIRST
    assert told[-1].numbers["gap"] == pytest.approx(0.2, rel=0.5)
    assert told[-1].numbers["others"] < 0.03


def test_a_worker_that_gets_the_weights_again_has_healed():
    def changed(step, gaps_W):
        return stale([2])(step, gaps_W) if step < FIRST + 40 else gaps_W

    told = told_of(DifferentRollouts(4), engines(4), FIRST + 140, changed)
    assert told[0].status == "open"
    assert told[-1].status == "closed"
    gaps = [one.numbers["gap"] for one in told]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 0.1


@pytest.mark.parametrize(("width", "size", "spread"), [(2, 0.013, 0.3), (4, 1e-7, 1.0)])
def test_healthy_engines_are_silent(width, size, spread):
    """Of 1,000 steps; their gaps are those of bf16, or of fp32 on one host."""
    stream = engines(width, size=size, spread=spread, seed=width)
    assert told_of(DifferentRollouts(width), stream, 1000) == []


def test_data_of_another_entropy_are_no_fault():
    """One worker's prompts make its engine differ one and a half times as much."""

    def changed(step, gaps_W):
        return gaps_W * [1, 1, 1.5, 1]

    assert told_of(DifferentRollouts(4), engines(4, spread=0.1), 1000, changed) == []


def test_a_gap_that_is_gross_on_all_workers_is_a_note_after_4_steps():
    diagnosis, stream = Diagnosis(RunFacts(4)), engines(4, spread=0.1)
    events = []
    for step in range(40):
        gaps_W = next(stream) * (20 if step >= 10 else 1)
        if step % 2 == 0:  # rollouts are drawn for two steps
            events += diagnosis.observe(report(step, gaps_W))
        else:
            events += diagnosis.observe(report(step, np.full(4, np.nan)))
    (first, *_) = events
    assert (first.cause, first.severity) == ("rollout.gap", Severity.NOTE)
    assert (first.first_step, first.last_step) == (10, 16)
    assert {one.cause for one in events} == {"rollout.gap"}
