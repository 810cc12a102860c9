"""A step's report against a naive computation from the workers' values."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent.assembly import summarize
from rankscope.bus.step import GatheredStep
from support.streams import worker_columns


def gathered(num_workers, sketches_WK=None, samples=None, measured=None, **columns):
    """Return a step; ``measured`` are fields that tell of gradients, ``columns`` of workers."""
    samples = samples or [[] for _ in range(num_workers)]
    return GatheredStep(
        step=3,
        time=1.0,
        observed=sketches_WK is not None or measured is not None,
        workers=worker_columns(num_workers, **columns),
        sketches_WK=sketches_WK,
        samples=tuple(np.array(batch, np.int64) for batch in samples),
        **(measured or {}),
    )


def vectors(num_workers, seed, size=30):
    """Return float64 vectors ``[W, size]`` with a common part, of different lengths."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_workers, size)) + rng.standard_normal(size)
    return rows * rng.uniform(0.1, 10, (num_workers, 1))


def weighted_cosine(rows):
    """Return Σ g_i·g_j / Σ |g_i||g_j| over pairs, by a loop."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    above = math.fsum(float(a @ b) for a, b in pairs)
    return above / math.fsum(float(np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs)


def rest_cosine(rows, i):
    """Return the cosine between one vector and the sum of all others."""
    rest = np.delete(rows, i, axis=0).sum(axis=0)
    return float(rows[i] @ rest / np.linalg.norm(rows[i]) / np.linalg.norm(rest))


def test_losses_norms_and_overhead_by_hand():
    step = gathered(
        4,
        measured={},
        loss=[1.0, np.nan, 3.0, np.inf],
        loss_sem=[0.3, np.nan, 0.4, np.nan],
        grad_norm=[2.0, 2.0, 4.0, 4.0],
        overhead_seconds=[0.1, 0.3, np.nan, 0.2],
    )
    report = summarize(step)
    assert (report.loss_mean, report.loss_std, report.loss_range) == (2.0, 1.0, 2.0)
    assert report.loss_std_expected == pytest.approx(math.sqrt(0.25 / 2 / 2))
    assert (report.grad_norm_mean, report.grad_norm_std) == (3.0, 1.0)
    assert report.overhead_seconds == 0.3
    assert report.gathered is step
    partly = summarize(replace(step, observed=False))  # some worker could not measure
    assert math.isnan(partly.grad_norm_mean)
    assert math.isnan(partly.grad_norm_std)
    assert partly.loss_mean == 2.0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_without_any_sketch_norms_give_the_weighted_cosine_exactly(num_workers, seed):
    rows = vectors(num_workers, seed)
    norms_W = np.linalg.norm(rows, axis=1)
    reduced = np.linalg.norm(rows.mean(axis=0))
    copies = {"reduced_copies": num_workers}
    reduced_W = np.full(num_workers, reduced)
    report = summarize(
        gathered(num_workers, measured=copies, grad_norm=norms_W, reduced_norm=reduced_W)
    )
    np.testing.assert_allclose(report.cosine_weighted, weighted_cosine(rows), atol=1e-12)
    np.testing.assert_allclose(report.grad_norm_reduced, reduced, rtol=1e-14)
    assert report.directions_undefined == 0
    assert math.isnan(report.cosine_mean)
    assert math.isnan(report.cosine_min)
    if num_workers > 2:
        assert np.isnan(report.derived["cosine_rest"]).all()
    assert report.cosines_WW is report.group_cosine_rest_WG is None
    products_W = rows @ rows.mean(axis=0)
    report = summarize(
        gathered(
            num_workers,
            measured={**copies, "reduced_products_W": products_W},
            grad_norm=norms_W,
            reduced_norm=reduced_W,
        )
    )
    expected_W = [rest_cosine(rows, i) for i in range(num_workers)]
    np.testing.assert_allclose(report.derived["cosine_rest"], expected_W, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_each_group_is_compared_with_the_same_group_of_the_others(num_workers, num_groups, seed):
    rows_WGK = np.stack(
        [vectors(num_workers, seed + group, 11) for group in range(num_groups)], axis=1
    ).astype(np.float32)
    report = summarize(
        gathered(
            num_workers,
            sketches_WK=rows_WGK.sum(axis=1),
            measured={
                "groups": tuple(f"layers.{group}" for group in range(num_groups)),
                "group_sketches_WGK": rows_WGK,
            },
        )
    )
    rows = rows_WGK.astype(np.float64)
    expected_WG = [
        [rest_cosine(rows[:, group], i) for group in range(num_groups)] for i in range(num_workers)
    ]
    np.testing.assert_allclose(report.group_cosine_rest_WG, expected_WG, atol=1e-9)


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
    report = summarize(gathered(2, samples=samples, num_samples=np.array(num_samples)))
    np.testing.assert_equal((report.samples_drawn, report.samples_distinct), (drawn, distinct))
