"""Pairs and blocks of workers that resemble each other too much."""

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.outliers.alike import AlikePairs
from support.stepping import describe, evidence_of
from support.streams import gathered


def observation(rng, step, width=8, block=(), above=0.2, samples=None):
    noise = 0.05 * rng.standard_normal((width, width))
    cosines = 0.3 + np.triu(noise, 1)
    cosines = np.triu(cosines, 1) + np.triu(cosines, 1).T + np.eye(width)
    for i in block:
        for j in block:
            cosines[i, j] += above * (i != j)
    own = [np.array([100 * step + rank]) for rank in range(width)] if samples is None else samples
    return StepReport(gathered(step, own, None), {}, {}, cosines, None)


def run(detector, num_steps, start=0, seed=0, **options):
    rng = np.random.default_rng(seed)
    told = []
    for step in range(start, start + num_steps):
        told += evidence_of(detector, observation(rng, step, **options))
    return told


@pytest.mark.parametrize("block", [(2, 6), (1, 4, 5)])
def test_a_block_that_is_too_much_alike_is_named(block):
    detector = AlikePairs(8, tuple)
    assert run(detector, 100) == []
    told = run(detector, 100, start=100, seed=1, block=block)
    assert told[-1].ranks == block
    assert told[-1].severity is Severity.WARNING
    assert abs(told[0].first_step - 100) <= 5
    assert told[0].count == told[0].last_step - told[0].first_step
    text, _ = describe(told[-1])
    assert "cosine +0." in text
    assert all(float(one.fields["bound"]) >= one.numbers["false_alarm_probability"] for one in told)


def test_the_beginning_is_known_where_the_sampling_interval_changes_after_it():
    detector = AlikePairs(8, tuple)
    assert run(detector, 100) == []
    assert run(detector, 3, start=100, seed=1, block=(2, 6)) == []
    steps = iter(range(128, 5000, 64))
    told = []
    while not told:
        step = next(steps)
        told = run(detector, 1, start=step, seed=step, block=(2, 6))
    assert abs(told[0].first_step - 100) <= 5


def test_blocks_of_half_the_workers_are_a_note():
    told = run(AlikePairs(8, tuple), 200, block=(0, 1, 2, 3))
    assert {one.severity for one in told if len(one.ranks) >= 4} == {Severity.NOTE}
    assert told[-1].ranks == (0, 1, 2, 3)


def test_it_closes_when_the_block_is_like_the_others_again():
    detector = AlikePairs(8, tuple)
    run(detector, 60, block=(2, 6))
    told = run(detector, 200, start=60, seed=2)
    assert told[-1].status == "closed"


def test_identical_batches_are_left_to_exact_evidence():
    same = [np.array([7, 8, 9])] * 2 + [np.array([rank]) for rank in range(6)]
    assert run(AlikePairs(8, tuple), 200, block=(0, 1), above=0.7, samples=same) == []


def test_workers_set_apart_are_left_out():
    assert run(AlikePairs(8, lambda: (6,)), 200, block=(2, 6)) == []


@pytest.mark.parametrize("width", [2, 65])
def test_too_few_and_too_many_workers_are_not_compared(width):
    assert run(AlikePairs(width, tuple), 10, width=width, block=(0, 1)) == []


def test_a_restored_detector_goes_on():
    detector, copy = AlikePairs(8, tuple), AlikePairs(8, tuple)
    run(detector, 40, block=(2, 6))
    copy.restore(detector.state())
    assert run(copy, 80, start=40, seed=3) == run(detector, 80, start=40, seed=3)
