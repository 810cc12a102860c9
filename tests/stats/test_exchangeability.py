"""The test of exchangeability: exact e-values, and evidence against units unlike the others."""

from itertools import permutations

import numpy as np
import pytest

from rankscope.record.states import pack_state
from rankscope.stats.bets import (
    BetKind,
    Betting,
    distances,
    normal_scores,
    pair_bets,
    rank_units,
    steady_scales,
    worker_bets,
)
from rankscope.stats.budget import ShiryaevRoberts
from rankscope.stats.exchangeability import ExchangeabilityTest
from rankscope.stats.state import StateError
from rankscope.stats.units import HEALED, compare_with_others

BETS = worker_bets()


def values_of_bets(values_SU):
    ranked = rank_units(np.asarray(values_SU, np.float64))
    _, away, scales_S = distances(ranked)
    out = np.full((len(BETS), *ranked.values_SU.shape), np.nan, np.float32)
    Betting(BETS).write_e_values(ranked, away, scales_S, out)
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


def test_equal_values_have_equal_e_values_and_no_spread_is_no_evidence():
    e_BSU = values_of_bets([STEPS["tied"], STEPS["all equal"]])
    assert (e_BSU[:, 0, 0] == e_BSU[:, 0, 1]).all()
    np.testing.assert_allclose(e_BSU[:, 1], 1, rtol=1e-6)


def test_every_bet_pays_on_its_own_kind():
    kinds = np.array([bet.kind.value for bet in BETS])
    e_BU = values_of_bets([STEPS["far out"]])[:, 0]
    assert (e_BU[kinds == "high", 4] > 2).all() or e_BU[kinds == "high", 4].max() > 4
    assert (e_BU[kinds == "low", 4] < 1).all()
    assert e_BU[kinds == "rare", 4] > 4
    assert e_BU[kinds == "spread", 4] > 2


def test_two_units_show_only_their_order():
    kinds = [bet.kind for bet in BETS]
    e_BU = values_of_bets([[1.0, 2.0]])[:, 0]
    for kind, e in zip(kinds, e_BU, strict=True):
        if kind in (BetKind.SPREAD, BetKind.RARE):
            assert e.tolist() == [1, 1]
    assert (values_of_bets([[1.0, np.nan]]) == 1).all()


def test_weights_of_all_bets_sum_to_one():
    for bets in (worker_bets(), pair_bets()):
        assert sum(bet.weight for bet in bets) == pytest.approx(1)


def test_normal_scores_are_odd_and_grow():
    scores = normal_scores(9)
    assert len(scores) == 17
    np.testing.assert_allclose(scores, -scores[::-1], atol=1e-12)
    assert (np.diff(scores) > 0).all()


def scales_of(current_TS):
    """Return the scales of steps of which nothing is known before."""
    nothing_S = np.full(len(current_TS[0]), np.nan)
    return steady_scales(nothing_S, np.zeros(len(nothing_S)), np.array(current_TS, np.float64))


def test_the_scale_remembers_the_past_and_follows_a_common_growth():
    scales = scales_of([[1.0]] * 200 + [[0.01], [100.0]]).used_TR[:, 0]
    assert scales[199] == pytest.approx(1)
    assert scales[200] == pytest.approx(1, abs=0.03)
    assert scales[201] == pytest.approx(50)  # half of it at once


def test_a_step_of_equal_units_or_of_too_few_teaches_no_scale():
    assert scales_of(np.zeros((1, 2))).used_TR.tolist() == [[0, 0]]  # nothing is known yet
    usual, then = [[1.0, 2.0]] * 30, [[1e-16, 3.0], [0.5, 1.0]]
    nothing = [[value] * 2 for value in (0.0, np.inf, np.nan) * 300]
    expected = scales_of([*usual, *then])
    found = scales_of([[0.0, 0.0], *usual, *nothing, *then])
    assert found.used_TR[-2:].tolist() == expected.used_TR[-2:].tolist()
    assert found.past_TR[-1].tolist() == expected.past_TR[-1].tolist()
    assert found.count_TR[-1].tolist() == expected.count_TR[-1].tolist()


def test_scales_go_on_from_what_is_known():
    steps = np.random.default_rng(0).random((20, 3))
    whole, half = scales_of(steps), scales_of(steps[:10])
    rest = steady_scales(half.past_TR[-1], half.count_TR[-1], steps[10:])
    assert rest.used_TR.tolist() == whole.used_TR[10:].tolist()


def test_an_e_detector_is_the_sum_over_beginnings():
    rng = np.random.default_rng(0)
    e_T = rng.exponential(size=40).astype(np.float32)
    detector = ShiryaevRoberts(1)
    for e in e_T:
        detector.observe(np.array([e]))
    products = np.cumprod(e_T[::-1].astype(np.float64))
    assert detector.evidence[0] == pytest.approx(products.sum(), rel=1e-4)
    ages = np.arange(1, len(e_T) + 1)
    assert detector.age[0] == pytest.approx((products * ages).sum() / products.sum(), rel=1e-4)
    detector.restart(...)
    assert detector.evidence[0] == detector.age[0] == 0


def test_evidence_does_not_overflow():
    detector = ShiryaevRoberts(1)
    for _ in range(500):
        detector.observe(np.array([8.0], np.float32))
    assert np.isfinite(detector.evidence).all()


def feed(test, rng, num_steps, change=None, num_signals=1):
    for _ in range(num_steps):
        values = 2 + 0.1 * rng.standard_normal((num_signals, test.num_units))
        if change is not None:
            change(values)
        take(test, values)


def take(test, *values):
    """Let a test take steps ``[S, U]`` together."""
    assert len(list(test.observe(np.array(values), range(len(values))))) == len(values)


def make(num_units=8, num_signals=1):
    weights = np.full(num_signals, 1 / num_signals)
    return ExchangeabilityTest(num_units, weights, np.ones(num_signals, bool), BETS)


@pytest.mark.parametrize("num_units", [2, 3, 8, 64])
def test_evidence_grows_by_one_a_step_on_average_in_a_healthy_run(num_units):
    """E[M_t] = t: the martingale behind the guarantee."""
    steps, runs = 12, 400
    final = []
    for seed in range(runs):
        rng = np.random.default_rng([seed, num_units])
        test = make(num_units)
        for _ in range(steps):
            take(test, rng.standard_t(3, (1, num_units)))
        final.append(test.evidence)
    error = np.std(final) / np.sqrt(runs)
    assert abs(np.mean(final) - steps) < 4 * error


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
    assert (trace.signal, trace.kind) == (1, BetKind.DOWN)
    assert trace.deviation == pytest.approx(-0.15, abs=0.03)
    assert trace.age == pytest.approx(40, abs=4)


def test_a_unit_set_apart_leaves_the_others_alone_and_heals():
    rng = np.random.default_rng(2)
    test = make()
    feed(test, rng, 30, shift(3, 0.3))
    test.flag(3)
    assert test.flagged == (3,)
    before = test.evidence
    feed(test, rng, 50, shift(3, 0.3))
    assert test.certainty(3) == pytest.approx(1, abs=0.05)
    assert test.evidence < before + 1000
    for _ in range(150):
        feed(test, rng, 1)
        if test.certainty(3) <= HEALED:
            break
    assert test.certainty(3) <= HEALED
    test.unflag(3)
    assert test.flagged == ()
    assert test.evidence_of_units()[3] == 0


def test_rare_large_errors_and_a_wider_spread_are_told_apart_from_shifts():
    rng = np.random.default_rng(3)
    rare, wide = make(), make()
    for step in range(60):
        size = 0.65 * rng.choice([-1, 1]) if step % 5 == 0 else 0.0
        feed(rare, rng, 1, shift(2, size))
        feed(wide, rng, 1, shift(6, 0.3 * rng.standard_normal()))
    assert rare.evidence_of_units().argmax() == 2
    assert rare.traces(2)[0].kind is BetKind.RARE
    assert abs(rare.traces(2)[0].deviation) > 0.25
    assert wide.evidence_of_units().argmax() == 6
    assert wide.traces(6)[0].kind in (BetKind.SPREAD, BetKind.RARE)


def test_signals_that_a_step_does_not_measure_stay_as_they_are():
    rng = np.random.default_rng(4)
    test = make(num_signals=2)
    feed(test, rng, 30, shift(1, 0.4, signal=1), num_signals=2)
    age = test.traces(1)[0].age
    take(test, np.stack([rng.standard_normal(8), np.full(8, np.nan)]))
    assert test.traces(1)[0].age == age


@pytest.mark.parametrize("num_units", [2, 3, 8])
@pytest.mark.parametrize("together", [2, 7, 60])
def test_how_many_steps_are_taken_together_makes_no_difference(num_units, together):
    """With values missing, signals unmeasured, and units set apart and taken back on the way."""
    rng = np.random.default_rng(num_units)
    values = rng.lognormal(size=(60, 3, num_units))
    values[rng.random(values.shape) < 0.1] = np.nan
    values[rng.random((60, 3)) < 0.2] = np.nan
    values[5] = np.nan

    def change(test, step):
        if step in (9, 10, 30):
            test.flag(step % num_units)
        elif step in (25, 40):
            test.unflag(test.flagged[0])

    one, many = make(num_units, 3), make(num_units, 3)
    for step in range(60):
        take_numbered(one, values[step : step + 1], [step], change)
    for start in range(0, 60, together):
        steps = range(60)[start : start + together]
        take_numbered(many, values[start : start + together], steps, change)
    assert pack_state(many.state()) == pack_state(one.state())
    assert many.z_SU.tolist() == one.z_SU.tolist()


def take_numbered(test, values, steps, after):
    for step in test.observe(values, steps):
        after(test, step)


def test_restoring_goes_on_where_it_stood():
    rng = np.random.default_rng(5)
    test = make(num_signals=2)
    feed(test, rng, 30, shift(4, 0.3), num_signals=2)
    test.flag(4)
    feed(test, rng, 10, shift(1, 0.3), num_signals=2)
    copy = make(num_signals=2)
    copy.restore(test.state())
    for one in (test, copy):
        feed(one, np.random.default_rng(6), 20, shift(1, 0.3), num_signals=2)
    assert copy.evidence == test.evidence
    assert copy.certainty(4) == test.certainty(4)
    assert copy.traces(1) == test.traces(1)


@pytest.mark.parametrize("num_units", [3, 4, 8])
def test_a_unit_set_apart_is_compared_fairly(num_units):
    """Its e-values among the others have mean one, too, when it is like them."""
    rng = np.random.default_rng(num_units)
    values = rng.standard_normal((4000, num_units))
    ranked = rank_units(np.where(np.arange(num_units) == 1, np.nan, values))
    z = np.zeros(4000, np.float32)
    e_BS = compare_with_others(values[:, 1], z, ranked, BETS)
    for bet, e in zip(BETS, e_BS, strict=True):
        if bet.kind is not BetKind.RARE:
            assert abs(e.mean() - 1) < 4 * e.std() / np.sqrt(len(e))


@pytest.mark.parametrize("num_units", [3, 5, 9])
def test_a_unit_set_apart_is_compared_with_the_others_as_before(num_units):
    values = np.random.default_rng(0).standard_normal((50, num_units))
    ranked = rank_units(np.where(np.arange(num_units) == 1, np.nan, values))
    e_BS = compare_with_others(values[:, 1], np.zeros(50, np.float32), ranked, BETS)
    by_rank_B = [bet.kind is not BetKind.RARE for bet in BETS]
    np.testing.assert_allclose(e_BS[by_rank_B], values_of_bets(values)[by_rank_B, :, 1], rtol=1e-5)


def test_a_foreign_state_is_refused():
    with pytest.raises(StateError):
        make(8).restore(make(9).state())
    with pytest.raises(StateError):
        make(8).restore({})


def test_values_that_are_not_finite_are_left_out():
    test = make()
    for bad in (np.inf, -np.inf, np.nan):
        values = np.arange(8.0)[None]
        values[0, 0] = bad
        take(test, values)
    assert np.isfinite(test.evidence)
