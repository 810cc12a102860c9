import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.outliers.alike import AlikePairs
from support.stepping import describe, evidence_of
from support.streams import gathered


def run(detector, num_steps, start=0, seed=0, block=(), above=0.2, samples=None):
    rng, reports = np.random.default_rng(seed), []
    for step in range(start, start + num_steps):
        cosines = np.triu(0.3 + 0.05 * rng.standard_normal((8, 8)), 1)
        cosines += cosines.T + np.eye(8)
        cosines[np.ix_(block, block)] += above * (1 - np.eye(len(block)))
        own = [[100 * step + rank] for rank in range(8)] if samples is None else samples
        reports.append(StepReport(gathered(step, own), {}, {}, cosines, None))
    return evidence_of(detector, *reports)


def test_a_block_that_is_too_much_alike_is_named():
    detector = AlikePairs(8, tuple)
    assert run(detector, 100) == []
    told = run(detector, 100, start=100, seed=1, block=(2, 6))
    assert (told[-1].ranks, told[-1].severity) == ((2, 6), Severity.WARNING)
    assert abs(told[0].first_step - 100) <= 5
    assert told[0].count == told[0].last_step - told[0].first_step
    text, _ = describe(told[-1])
    assert "cosine +0." in text
    assert all(float(one.fields["bound"]) >= one.numbers["false_alarm_probability"] for one in told)


def test_pairs_that_are_alike_for_a_while_are_over_with_the_figures_of_these_steps():
    detector = AlikePairs(8, tuple)
    run(detector, 60)
    run(detector, 30, start=60, seed=1, block=(2, 6))
    last = run(detector, 210, start=90, seed=2)[-1]
    assert (last.status, last.ranks) == ("closed", (2, 6))
    assert abs(last.first_step - 60) <= 5
    assert abs(last.last_step - 90) <= 10
    assert last.numbers["cosine_above_other_pairs"] == pytest.approx(0.2, abs=0.04)
    when = f"from about step {last.first_step} to about step {last.last_step}"
    assert f"were more alike than those of other workers {when}" in describe(last)[0]


def test_blocks_of_half_the_workers_are_a_note():
    told = run(AlikePairs(8, tuple), 200, block=(0, 1, 2, 3))
    assert {one.severity for one in told if len(one.ranks) >= 4} == {Severity.NOTE}
    assert told[-1].ranks == (0, 1, 2, 3)


def test_identical_batches_are_left_to_exact_evidence():
    same = [np.array([7, 8, 9])] * 2 + [np.array([rank]) for rank in range(6)]
    assert run(AlikePairs(8, tuple), 200, block=(0, 1), above=0.7, samples=same) == []
