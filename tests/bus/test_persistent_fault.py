"""How long a fault has lasted, who is odd, and the words for it."""

import pytest

from rankscope.bus.detector import HEALED_AFTER, PersistentFault
from rankscope.bus.replicas import minority_ranks, name_values


def shows(seen, *steps):
    """Return what the steps, each given by the ranks that show the fault, have to tell."""
    return [seen.observe(step, ranks) for step, ranks in enumerate(steps)]


def test_a_fault_is_told_once_enough_steps_show_it_on_the_same_worker():
    seen = PersistentFault(3)
    assert shows(seen, [1], [2], [1], [], [1]) == [False, False, False, False, True]
    assert (seen.ranks, seen.first, seen.last, seen.count) == ({1}, 0, 4, 3)


def test_in_a_row_means_without_a_gap():
    seen = PersistentFault(2, in_a_row=True)
    assert shows(seen, [1], [], [1], [2], [1], [1, 2]) == [False] * 5 + [True]
    assert (seen.ranks, seen.first) == ({1}, 4)


def test_it_heals_once_and_may_come_back():
    seen = PersistentFault()
    quiet = [[]] * (HEALED_AFTER - 1)
    assert shows(seen, [0], *quiet, [0], *quiet) == [True, *[False] * 15, True, *[False] * 15]
    assert seen.observe(32, [])
    assert not seen.open
    assert not any(seen.observe(step, []) for step in range(33, 99))
    assert seen.observe(99, [1])
    assert (seen.open, seen.ranks, seen.first, seen.last, seen.count) == (True, {0, 1}, 0, 99, 3)


def test_traces_too_far_apart_are_forgotten():
    seen = PersistentFault(2)
    quiet = [[]] * HEALED_AFTER
    assert not any(shows(seen, [0], *quiet, [0], *quiet, [0]))


def test_it_goes_on_after_a_restart():
    seen, copy = PersistentFault(3), PersistentFault(3)
    shows(seen, [0], [0, 1])
    copy.restore(seen.state())
    assert copy.observe(2, [0, 1])
    assert copy.ranks == {0}


@pytest.mark.parametrize(
    ("values", "odd", "words"),
    [
        ([1, 1, 1], (), "1 on the others"),
        ([1, 2, 1], (1,), "2 on rank 1, 1 on the others"),
        ([1, 2], (0, 1), "1 on rank 0, 2 on rank 1"),
        ([1, None, None], (), "1 on the others"),
        ([None, 2, 1, 1], (1,), "2 on rank 1, 1 on the others"),
        ([1, 1, 2, 2], (0, 1, 2, 3), "1 on ranks 0 and 1, 2 on ranks 2 and 3"),
        ([3, 1, 1, 1, 2], (0, 4), "3 on rank 0, 2 on rank 4, 1 on the others"),
        ([], (), ""),
    ],
)
def test_the_minority_is_odd_and_values_are_named(values, odd, words):
    assert minority_ranks(values) == odd
    assert name_values(values) == words


def test_many_values_are_cut():
    values = list(range(9))
    assert name_values(values).endswith("3 on rank 3, other values on 5 more")
