"""Workers that run other numbers of micro-batches, for ever or for a while."""

import numpy as np

from rankscope.bus.finding import Severity
from support.stepping import findings_of
from support.streams import gathered

NO_SAMPLES = np.empty(0, np.int64)


def told_of(counts_of, steps, width=4):
    without = [NO_SAMPLES] * width
    given = (gathered(t, without, micro_batches=counts_of(t)) for t in range(steps))
    return findings_of("data.micro_batches", given)


def test_one_of_fewer_micro_batches_is_named_since_its_beginning_until_its_end():
    def counts(step):
        epoch_end = step % 10 == 9
        if epoch_end:
            return [2, 2, 2, 1]
        return [4, 4, 3 if 30 <= step < 100 else 4, 4]

    told = told_of(counts, 160)
    assert {(one.severity, one.ranks, one.first_step) for one in told} == {
        (Severity.WARNING, (2,), 30)
    }
    assert told[0].step - 30 < 45
    assert "since step 30: 3 on rank 2, 4 on the others" in told[0].explanation
    assert [one.status for one in told][-2:] == ["open", "closed"]


def test_numbers_that_change_from_step_to_step_or_at_an_epochs_end_are_healthy():
    rng = np.random.default_rng(0)
    assert told_of(lambda step: rng.integers(1, 3, 2), 500, 2) == []
    assert told_of(lambda step: [4, 3] if step % 3 == 2 else [4, 4], 300, 2) == []


def test_of_two_workers_both_are_named_and_all_steps_are_counted():
    told = told_of(lambda step: [4 if step < 20 else 2, 4], 80, 2)
    assert {one.ranks for one in told} == {(0, 1)}
    assert told[0].evidence["steps"] == told[0].step - 19
