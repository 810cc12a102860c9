"""The test on which the severity of an overlap rests, against simulated coin tosses."""

import numpy as np
import pytest

from rankscope.evidence.samples.overlap import _chance, _ShareTest


def smallest_chance(rng, p, num_repeats):
    """Toss repeats one by one and return the smallest chance that was ever stated."""
    test, smallest = _ShareTest(), 1.0
    for own in rng.random(num_repeats) < p:
        test.add(int(not own), int(own), p)
        smallest = min(smallest, _chance(test.log_ratio))
    return smallest


@pytest.mark.parametrize("p", [0.5, 0.125])
@pytest.mark.parametrize("level", [0.2, 0.05])
def test_innocent_repeats_seldom_look_guilty_however_often_one_looks(p, level):
    rng = np.random.default_rng(11)
    calls = sum(smallest_chance(rng, p, 150) <= level for _ in range(300))
    assert calls / 300 <= level + 3 * np.sqrt(level * (1 - level) / 300)


@pytest.mark.parametrize("num_workers", [2, 8, 64])
def test_repeats_of_others_only_become_certain_as_their_odds_say(num_workers):
    test, p = _ShareTest(), 1 / num_workers
    for repeats in range(1, 12 * num_workers):
        test.add(1, 0, p)
        assert (1 - p) ** repeats <= _chance(test.log_ratio) * (1 + 1e-9)
        assert _chance(test.log_ratio) <= min(1.0, 2 * (1 - p) ** repeats) * (1 + 1e-9)
    assert _chance(test.log_ratio) < 1e-3


def test_a_few_own_repeats_delay_certainty_but_do_not_prevent_it():
    test = _ShareTest()
    test.add(0, 3, 0.125)
    assert _chance(test.log_ratio) == 1.0
    test.add(300, 0, 0.125)
    assert _chance(test.log_ratio) < 1e-3


def test_own_repeats_in_proportion_keep_the_innocent_reading():
    test = _ShareTest()
    for _ in range(1000):
        test.add(7, 1, 0.125)
    assert _chance(test.log_ratio) == 1.0


def test_tests_of_two_stretches_add_up():
    whole, first, second = _ShareTest(), _ShareTest(), _ShareTest()
    for test in (whole, first):
        test.add(20, 1, 0.25)
    for test in (whole, second):
        test.add(50, 0, 0.125)
    first.merge(second)
    assert _chance(first.log_ratio) == pytest.approx(_chance(whole.log_ratio))


def test_two_tests_together_are_wrong_no_more_often_than_stated():
    rng = np.random.default_rng(3)
    level, wrong, num_jobs = 0.1, 0, 400
    for _ in range(num_jobs):
        far, close, smallest = _ShareTest(), _ShareTest(), 1.0
        for own, close_own in rng.random((80, 2)) < 0.5:
            far.add(int(not own), int(own), 0.5)
            close.add(int(not close_own), int(close_own), 0.5)
            logs = far.log_ratio, close.log_ratio
            smallest = min(smallest, _chance(*logs, sum(logs)))
        wrong += smallest <= level
    assert 0 < wrong / num_jobs <= level + 3 * np.sqrt(level * (1 - level) / num_jobs)
