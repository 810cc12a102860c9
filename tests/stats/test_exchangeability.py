from decimal import Decimal
from itertools import permutations

import numpy as np
import pytest

from rankscope.stats import bets
from rankscope.stats.exchangeability import ExchangeabilityTest
from rankscope.stats.units import RecentSteps, compare_with_others, friedman

BETS = bets.worker_bets()


def values_of_bets(values_SU):
    ranked = bets.rank_units(np.asarray(values_SU, np.float64))
    _, away, scales_S = bets.distances(ranked)
    out = np.full((len(BETS), *ranked.values_SU.shape), np.nan, np.float32)
    bets.Betting(BETS).write_e_values(ranked, away, scales_S, out)
    return out


STEPS = {
    "distinct": [0.3, 1.0, -2.0, 5.0, 0.1],
    "tied": [1.0, 1.0, 0.0, 2.0, 2.0],
    "all equal": [3.0] * 5,
    "far out": [0.0, 0.1, -0.1, 0.05, 60.0],
    "two far out": [0.0, 0.1, -0.1, -70.0, 60.0],
    "one missing": [0.3, np.nan, -2.0, 5.0, 0.1],
    "large": [1e300, -1e300, 1.0, 2.0, 3.0],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_e_values_of_a_step_have_mean_one_and_follow_the_units(step):
    """Exactness: whoever holds which value, the mean over who is present is 1."""
    e_BSU = values_of_bets([step])
    present = np.isfinite(step)
    assert np.isfinite(e_BSU).all()
    assert (e_BSU >= 0).all()
    np.testing.assert_allclose(e_BSU[:, 0, present].mean(axis=1), 1, rtol=1e-5)
    assert (e_BSU[:, 0, ~present] == 1).all()
    for order in [*permutations(range(5))][::17]:
        shuffled = values_of_bets([np.array(step)[list(order)]])
        np.testing.assert_allclose(shuffled[:, 0], e_BSU[:, 0][:, list(order)], rtol=1e-5)


def test_every_bet_pays_on_its_own_kind():
    kinds = np.array([bet.kind.value for bet in BETS])
    e_BU = values_of_bets([STEPS["far out"]])[:, 0]
    assert (e_BU[kinds == "high", 4] > 2).all() or e_BU[kinds == "high", 4].max() > 4
    assert (e_BU[kinds == "low", 4] < 1).all()
    assert e_BU[kinds == "rare", 4] > 4
    assert e_BU[kinds == "spread", 4] > 2


def feed(test, rng, num_steps, change=None, num_signals=1):
    for _ in range(num_steps):
        values = 2 + 0.1 * rng.standard_normal((num_signals, test.num_units))
        if change is not None:
            change(values)
        take(test, values)


def take(test, *values):
    assert len(list(test.observe(np.array(values), range(len(values))))) == len(values)


def make(num_units=8, num_signals=1):
    weights = np.full(num_signals, 1 / num_signals)
    return ExchangeabilityTest(num_units, weights, np.ones(num_signals, bool), BETS)


@pytest.mark.parametrize("num_units", [2, 8])
def test_evidence_grows_by_one_a_step_on_average_in_a_healthy_run(num_units):
    """E[M_t] = t: the martingale behind the guarantee."""
    steps, runs = 12, 250
    final = []
    for seed in range(runs):
        rng = np.random.default_rng([seed, num_units])
        test = make(num_units)
        for _ in range(steps):
            take(test, rng.standard_t(3, (1, num_units)))
        final.append(test.evidence)
    assert abs(np.mean(final) - steps) < 4 * (np.std(final) / np.sqrt(runs))


def test_a_rounding_after_many_steps_of_equal_units_is_not_far_out():
    test = make()
    feed(test, np.random.default_rng(0), 50)

    def equal(values):
        values[:] = 0.5

    feed(test, np.random.default_rng(0), 2000, equal)
    take(test, [[0.5] * 7 + [0.5 + 1e-15]])
    assert 0 < test.z_SU.max() < 1


def shift(unit, by, signal=0):
    def change(values):
        values[signal, unit] += by

    return change


def test_a_shift_is_found_with_its_unit_signal_direction_size_and_beginning():
    rng = np.random.default_rng(1)
    test = make(num_signals=3)
    feed(test, rng, 100, num_signals=3)
    feed(test, rng, 40, shift(5, -0.3, signal=1), num_signals=3)
    assert test.evidence > 1e6
    assert test.evidence_of_units().argmax() == 5
    trace = test.traces(5)[0]
    assert (trace.signal, trace.kind) == (1, bets.BetKind.DOWN)
    assert trace.deviation == pytest.approx(-0.15, abs=0.03)
    assert trace.age == pytest.approx(40, abs=4)


@pytest.mark.parametrize("num_units", [3, 9])
def test_a_unit_set_apart_is_compared_with_the_others_as_before(num_units):
    values = np.random.default_rng(0).standard_normal((50, num_units))
    ranked = bets.rank_units(np.where(np.arange(num_units) == 1, np.nan, values))
    e_BS = compare_with_others(values[:, 1], np.zeros(50, np.float32), ranked, BETS)
    by_rank_B = [bet.kind is not bets.BetKind.RARE for bet in BETS]
    np.testing.assert_allclose(e_BS[by_rank_B], values_of_bets(values)[by_rank_B, :, 1], rtol=1e-5)


def test_a_bound_in_words_is_never_below_the_bound_nor_a_digit_above_it():
    for num_steps in (*range(1, 3_000, 7), *range(3_000, 10**6, 9_973)):
        exact, said = Decimal(num_steps) / 10**6, Decimal(bets.bound_in_words(num_steps))
        assert float(exact) == bets.false_alarm_bound(num_steps)
        assert exact <= said < exact + Decimal(10) ** exact.adjusted()


UNITS = 4


def test_every_signal_knows_the_numbers_of_its_steps():
    recent = RecentSteps(2, UNITS)
    steps = [*range(100), *range(128, 64 * 22, 64)]  # then measured in every 64th step alone
    for step in steps:
        rows = slice(0, 2 if step % 2 == 0 else 1)
        recent.remember(np.zeros((rows.stop, UNITS)), rows, step)
    assert [recent.step_of(0, back) for back in (0, 1, 19, 20, 63)] == [1344, 1280, 128, 99, 56]
    assert [recent.step_of(0, back) for back in (64, 119)] == [55, 0]  # as the two oldest lie
    assert [recent.step_of(1, back) for back in (0, 19, 20, 63, 64)] == [1344, 128, 98, 12, 10]


@pytest.mark.parametrize(("shape", "level"), [((10, 3), 0.05), ((20, 7), 0.01)])
def test_units_that_are_alike_differ_as_often_as_the_level_says(shape, level):
    rng = np.random.default_rng(shape[0])
    runs = 1000
    found = sum(not friedman(rng.standard_t(2, shape), level)[1] for _ in range(runs))
    assert found <= runs * level + 4 * np.sqrt(runs * level)
    assert found >= runs * level / 4


def test_ties_and_missing_values():
    assert friedman(np.ones((10, 4)), 0.5)[1]
    values = np.random.default_rng(2).standard_normal((10, 4))
    values[:7, 0] = np.nan
    assert friedman(values, 0.999)[1]  # three steps tell nothing
    assert not friedman(np.vstack([values, values[-1:]]), 0.999)[1]  # four do
