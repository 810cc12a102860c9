"""The memory of batches that came before."""

import numpy as np
import pytest

from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import REMEMBERED, RecentBatches
from rankscope.record.states import pack_state, unpack_state


def one(memory, step, *digests):
    [recurrence] = memory.observe(np.array([digests]), [step])
    return recurrence.ages_W.tolist(), recurrence.before


def test_repeats_of_a_worker_and_of_all_workers():
    memory = RecentBatches(2)
    assert one(memory, 0, 1, 2) == ([0, 0], -1)
    assert one(memory, 1, 3, 4) == ([0, 0], -1)
    assert one(memory, 2, 5, 2) == ([0, 2], -1)
    assert one(memory, 3, 3, 4) == ([2, 2], 1)
    for step in range(4, 4 + REMEMBERED):
        assert one(memory, step, 100 + step, 300 + step) == ([0, 0], -1)
    assert one(memory, 99, 3, 4) == ([0, 0], 3)  # that of all workers is remembered much longer
    assert one(memory, 100, 4, 3) == ([0, 0], -1)


def test_unknown_batches_are_never_the_same():
    memory = RecentBatches(2)
    for step in range(3):
        assert one(memory, step, MISSING_INT, MISSING_INT) == ([0, 0], -1)
    assert one(memory, 3, MISSING_INT, 7) == ([0, 0], -1)
    assert one(memory, 4, MISSING_INT, MISSING_INT) == ([0, 0], -1)
    assert one(memory, 5, MISSING_INT, 7) == ([0, 1], 3)  # steps without any batch do not count


def test_different_batches_are_counted():
    memory = RecentBatches(2)
    digests_TW = np.array([[1, 1], [2, 5], [1, 6], [MISSING_INT, 7]])
    found = memory.observe(digests_TW, range(4))
    assert [r.num_distinct(0, 3) for r in found] == [1, 2, 2, 2]
    assert [r.num_distinct(1, 3) for r in found] == [1, 2, 3, 3]


@pytest.mark.parametrize("together", [2, 7, 64, 300])
def test_how_many_steps_are_taken_together_makes_no_difference(together):
    rng = np.random.default_rng(0)
    digests_TW = rng.integers(40, size=(300, 3))
    digests_TW[rng.random(digests_TW.shape) < 0.2] = MISSING_INT
    digests_TW[rng.random(300) < 0.1] = MISSING_INT
    alone, memory = RecentBatches(3, generation=50), RecentBatches(3, generation=50)
    expected = [one(alone, step, *digests_W) for step, digests_W in enumerate(digests_TW)]
    found = []
    for start in range(0, 300, together):
        digests = digests_TW[start : start + together]
        now = memory.observe(digests, range(start, start + len(digests)))
        found += [(recurrence.ages_W.tolist(), recurrence.before) for recurrence in now]
    assert found == expected
    assert any(before >= 0 for _, before in found)
    copy = RecentBatches(3, generation=50)
    copy.restore(unpack_state(pack_state(memory.state())))
    assert one(copy, 300, *digests_TW[299]) == one(alone, 300, *digests_TW[299])
