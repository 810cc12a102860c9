"""The test on which the severity of an overlap rests, against simulated coin tosses."""

import numpy as np

from rankscope.evidence.samples.overlap import _chance, _ShareTest


def smallest_chance(rng, p, num_repeats):
    """Toss repeats one by one and return the smallest chance that was ever stated."""
    test, smallest = _ShareTest(), 1.0
    for own in rng.random(num_repeats) < p:
        test.add(int(not own), int(own), p)
        smallest = min(smallest, _chance(test.log_ratio))
    return smallest


def test_innocent_repeats_seldom_look_guilty_however_often_one_looks():
    level = 0.2
    rng = np.random.default_rng(11)
    calls = sum(smallest_chance(rng, 0.125, 150) <= level for _ in range(300))
    assert calls / 300 <= level + 3 * np.sqrt(level * (1 - level) / 300)


def test_a_few_own_repeats_delay_certainty_but_do_not_prevent_it():
    test = _ShareTest()
    test.add(0, 3, 0.125)
    assert _chance(test.log_ratio) == 1.0
    test.add(300, 0, 0.125)
    assert _chance(test.log_ratio) < 1e-3
