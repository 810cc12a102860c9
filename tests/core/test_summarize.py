"""A step's report against a naive computation from the workers' values."""

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.core.signals import DType, Source, Table, signals
from rankscope.core.step import MISSING_INT, GatheredStep, StepReport
from rankscope.core.summarize import summarize

LOCAL = signals(Table.WORKERS, Source.LOCAL)
MISSING = {DType.FLOAT: np.nan, DType.INT: MISSING_INT, DType.BOOL: False}
NUMPY = {DType.FLOAT: np.float64, DType.INT: np.int64, DType.BOOL: np.bool_}


def gathered(num_workers, sketches_WK=None, samples=None, **columns):
    workers = {s.name: np.full(num_workers, MISSING[s.dtype], NUMPY[s.dtype]) for s in LOCAL}
    workers.update({name: np.asarray(values) for name, values in columns.items()})
    samples = samples or [[] for _ in range(num_workers)]
    return GatheredStep(
        step=3,
        time=1.0,
        observed=sketches_WK is not None,
        workers=workers,
        sketches_WK=sketches_WK,
        samples=tuple(np.array(batch, np.int64) for batch in samples),
    )


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_every_derived_column_is_filled_and_no_other(num_workers):
    report = summarize(gathered(num_workers))
    assert set(report.values) == {s.name for s in signals(Table.STEPS, Source.DERIVED)}
    assert set(report.derived) == {s.name for s in signals(Table.WORKERS, Source.DERIVED)}
    unknown = {name: value for name, value in report.values.items() if name != "interval"}
    assert all(math.isnan(value) for value in unknown.values())
    assert np.isnan(report.derived["cosine_rest"]).all()
    assert report.cosines_WW is None


def test_losses_norms_and_overhead_by_hand():
    step = gathered(
        4,
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


@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.sampled_from([None, 0.0, np.nan, np.inf]))
def test_directions_agree_with_float64_vectors(num_workers, seed, poison):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((num_workers, 20)) + rng.standard_normal(20)).astype(np.float32)
    good = list(range(num_workers))
    if poison is not None:
        rows[1] = poison
        good.remove(1)
    report = summarize(gathered(num_workers, sketches_WK=rows))
    g = rows.astype(np.float64)
    dots = [
        (g[i] @ g[j], np.linalg.norm(g[i]) * np.linalg.norm(g[j]))
        for i in good
        for j in good
        if i < j
    ]
    cosines = [dot / norms for dot, norms in dots]
    mean = np.mean(cosines) if cosines else np.nan
    weighted = sum(d for d, _ in dots) / sum(n for _, n in dots) if dots else np.nan
    np.testing.assert_allclose(report.cosine_mean, mean, atol=1e-12)
    np.testing.assert_allclose(report.cosine_weighted, weighted, atol=1e-12)
    np.testing.assert_allclose(report.cosine_min, min(cosines, default=np.nan), atol=1e-12)
    assert report.directions_undefined == num_workers - len(good)
    assert report.cosines_WW.shape == (num_workers, num_workers)
    for i in range(num_workers):
        rest = sum((g[j] for j in good if j != i), np.zeros(20))
        length = np.linalg.norm(g[i]) * np.linalg.norm(rest) if i in good else 0.0
        expected = g[i] @ rest / length if length else np.nan
        np.testing.assert_allclose(report.derived["cosine_rest"][i], expected, atol=1e-9)


def test_one_worker_has_a_direction_but_no_cosine():
    report = summarize(gathered(1, sketches_WK=np.ones((1, 5), np.float32), loss=[2.0]))
    assert report.directions_undefined == 0
    assert math.isnan(report.cosine_mean)
    assert (report.loss_mean, report.loss_std) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("samples", "num_samples", "drawn", "distinct"),
    [
        ([[1, 2], [2, 3]], [2, 2], 4, 3),
        ([[1, 2], [2, 3]], [MISSING_INT, MISSING_INT], 4, 3),
        ([[1, 2], []], [2, 0], 2, 2),
        ([[1, 2], [2, 3]], [5, 2], 7, math.nan),
        ([[], []], [0, 0], math.nan, math.nan),
    ],
)
def test_samples_are_counted_and_unknown_ones_are_not_guessed(
    samples, num_samples, drawn, distinct
):
    report = summarize(gathered(2, samples=samples, num_samples=np.array(num_samples)))
    np.testing.assert_equal((report.samples_drawn, report.samples_distinct), (drawn, distinct))


def test_a_report_can_be_copied_and_says_what_it_has():
    report = StepReport(None, {"loss_mean": 2.0})
    assert copy.copy(report).loss_mean == 2.0
    assert pickle.loads(pickle.dumps(report)).loss_mean == 2.0
    with pytest.raises(AttributeError, match="no value 'los_mean'; it has loss_mean"):
        _ = report.los_mean
