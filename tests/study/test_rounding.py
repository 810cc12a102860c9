import math

import numpy as np
import pytest
import torch

from rankscope.lab.study import rounding
from rankscope.lab.study import rounding_result as pairs
from rankscope.lab.study.rounding_result import ORDER, GrowthOptions, fit_growth
from support.benchmarks import load_benchmark
from support.ranks import run_ranks

STEPS = 5


@pytest.fixture(scope="module")
def result():
    return rounding.run_growth(GrowthOptions(steps=STEPS, workers=4, base_steps=10, evaluations=2))


def pair_of(result, name):
    pair = result.pair(name)
    assert pair is not None
    return pair


def test_the_same_training_again_gives_the_same_bits(result):
    control = pair_of(result, pairs.CONTROL)

    assert control.identical
    assert control.first_step is None
    assert control.distance == control.differing == control.loss_difference == [0.0] * STEPS
    assert not any(control.evaluation)
    assert [layer["first_step"] for layer in control.layers] == [None] * len(control.layers)


@pytest.mark.parametrize("name", [ORDER, pairs.WORKERS])
def test_the_order_alone_parts_at_once_by_the_size_of_rounding(result, name):
    pair = pair_of(result, name)

    assert not pair.identical
    assert pair.first_step == 1
    assert 1e-9 < pair.gradient_distance[0] < 1e-6
    assert 1e-11 < pair.distance[0] < 1e-5
    assert pair.max_ulp[0] >= 1
    assert 0 < pair.differing[0] < 1
    assert min(layer["first_step"] or 99 for layer in pair.layers) == 1


def test_16_bit_buffers_part_by_more_than_the_order_and_by_less_than_other_data(result):
    order, data = pair_of(result, ORDER), pair_of(result, pairs.DATA)
    sizes = {pairs.BFLOAT16: 2.0**-8, pairs.FLOAT16: 2.0**-11, pairs.FLOAT16_SCALED: 2.0**-11}
    for name, roundoff in sizes.items():
        pair = pair_of(result, name)
        assert pair.skipped == 0
        assert roundoff / 10 < pair.gradient_distance[0] < 4 * roundoff
        assert 10 * order.distance[-1] < pair.distance[-1] < data.distance[-1] / 10
    assert data.gradient_distance[0] > 0.1


def test_loss_scale_saves_small_gradients_from_a_16_bit_buffer():
    tiny = torch.randn(16, 5000, generator=torch.Generator().manual_seed(1)) * 1e-8
    far = []
    for options in ({}, {"loss_scale": 65536.0}):
        arithmetic = rounding.StudiedReduction(8, dtype="float16", **options)
        reduced = rounding.Reducer(arithmetic, 1000, 0).reduce(tiny)
        far.append(rounding.relative_distance(tiny.double().mean(0), reduced))
    assert far[0] > 0.5
    assert far[1] < 0.01


def test_growth_is_fitted_by_the_law_that_made_it():
    steps = np.arange(1, 101)
    power = fit_growth(list(1e-8 * steps**0.5))
    doubling = fit_growth(list(1e-8 * 2.0 ** (steps / 7)))
    late = fit_growth([0.0, 0.0, *1e-8 * steps**1.5, 1e-9, math.nan])

    assert power.laws[0].name == "power"
    assert power.laws[0].rate == pytest.approx(0.5)
    assert "steps^0.5" in power.words
    assert doubling.laws[0].name == "exponential"
    assert 1 / doubling.laws[0].rate == pytest.approx(7)
    assert "doubles about every 7 steps" in doubling.words
    assert (late.first_step, late.last_step) == (3, 102)
    assert late.laws[0].rate == pytest.approx(1.5)
    assert late.factor == pytest.approx(1000)
    assert fit_growth([0.0, 0.0]) is None
    assert fit_growth([1e-8, 2e-8, 2e-8]) is None
    assert "less than threefold" in fit_growth([1e-8, 1.1e-8, 1.2e-8, 1.3e-8, 1.2e-8]).words
    assert "in jumps" in fit_growth([1e-8, 1e-8, 1e-8, 1e-8, 1e-3, 1e-3, 1e-3, 1.1e-3]).words


def _two_bucket_sizes(rank):
    options = GrowthOptions(steps=STEPS, workers=3, base_steps=0)
    ingredients = rounding.prepare_growth(options)
    benchmark = load_benchmark("rounding_growth")
    train_with_ddp, distances = benchmark.train_with_ddp, benchmark.distances
    one = train_with_ddp(options, ingredients, 25.0)
    again = train_with_ddp(options, ingredients, 25.0)
    return distances(one, again), distances(one, train_with_ddp(options, ingredients, 0.05))


@pytest.mark.ranks
def test_real_ranks_with_another_bucket_size_part_like_the_simulated_order():
    results = run_ranks(_two_bucket_sizes, 3)  # the fewest that have more than one order
    options = GrowthOptions(steps=STEPS, workers=3, base_steps=0, pairs=(ORDER,))
    simulated = pair_of(rounding.run_growth(options), ORDER).distance[-1]

    for again, apart in results:
        assert again == [0.0] * STEPS
        assert simulated / 10 < apart[-1] < simulated * 10
