"""A step's report from the workers' values, of which some are missing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.steps import common_scale
from rankscope.evidence.loss.combine import amend
from support.recorded import cosines_with_the_rest
from support.streams import gathered


def test_losses_norms_and_overhead_by_hand():
    step = gathered(
        3,
        [[]] * 4,
        loss=[1.0, np.nan, 3.0, np.inf],
        loss_sem=[0.3, np.nan, 0.4, np.nan],
        grad_norm=[2.0, 2.0, 4.0, 4.0],
        overhead_seconds=[0.1, 0.3, np.nan, 0.2],
    )
    report = summarize(replace(step, observed=True))
    assert (report.loss_mean, report.loss_std, report.loss_range) == (2.0, 1.0, 2.0)
    assert report.loss_std_expected == pytest.approx(math.sqrt(0.25 / 2 / 2))
    assert (report.grad_norm_mean, report.grad_norm_std) == (3.0, 1.0)
    assert report.overhead_seconds == 0.3

    partly = summarize(step)  # some worker could not measure
    assert math.isnan(partly.grad_norm_mean)
    assert math.isnan(partly.grad_norm_std)
    assert partly.loss_mean == 2.0


@pytest.mark.parametrize(
    ("samples", "num_samples", "drawn", "distinct"),
    [
        ([[1, 2], [2, 3]], [2, 2], 4, 3),
        ([[1, 2], [2, 3]], [5, 2], 7, math.nan),
        ([[], []], [0, 0], math.nan, math.nan),
    ],
)
def test_samples_are_counted_and_unknown_ones_are_not_guessed(
    samples, num_samples, drawn, distinct
):
    report = summarize(gathered(3, samples, num_samples=num_samples))
    np.testing.assert_equal((report.samples_drawn, report.samples_distinct), (drawn, distinct))


def test_sketches_are_those_of_the_loss_before_it_was_scaled():
    sketches_WK = np.arange(8, dtype=np.float32).reshape(2, 4)
    step = gathered(3, [[], []], sketches_WK, grad_scale=[-8.0, -8.0])
    undone = amend(replace(step, group_sketches_WGK=sketches_WK[:, None]))
    np.testing.assert_array_equal(undone.sketches_WK, sketches_WK / 8)
    np.testing.assert_array_equal(undone.group_sketches_WGK, sketches_WK[:, None] / 8)


@pytest.mark.parametrize(("tokens", "scale"), [(1, 1.0), (7, 7.0)])
def test_weights_by_tokens_leave_the_norm_of_the_reduced_gradient(tokens, scale):
    counts_W = np.array([53.0, 71.0, 97.0, 94.0])
    own_WK = np.random.default_rng(0).standard_normal((4, 11)).astype(np.float32)
    scales_W = tokens * counts_W / counts_W.mean()
    step = gathered(
        3,
        [[]] * 4,
        scales_W[:, None].astype(np.float32) * own_WK,
        grad_scale=scales_W,
        loss_weight=counts_W,
        reduced_norm=[float(np.linalg.norm(scales_W @ own_WK / 4))] * 4,
    )
    whole = np.linalg.norm(np.average(own_WK, axis=0, weights=counts_W))  # of all tokens' mean
    np.testing.assert_allclose(amend(step).workers["reduced_norm"], whole, rtol=1e-6)
    assert common_scale(step) == pytest.approx(scale)


def test_each_group_is_compared_with_the_same_group_of_the_others():
    rows_WGK = np.random.default_rng(0).standard_normal((4, 3, 11)).astype(np.float32)
    step = gathered(3, [[]] * 4, rows_WGK.sum(axis=1))
    step = replace(step, groups=("a", "b", "c"), group_sketches_WGK=rows_WGK)
    found_WG = summarize(step).group_cosine_rest_WG
    for group, rows_WK in enumerate(rows_WGK.astype(np.float64).swapaxes(0, 1)):
        expected_W = cosines_with_the_rest(rows_WK, rows_WK)
        np.testing.assert_allclose(found_WG[:, group], expected_W, atol=1e-9)
