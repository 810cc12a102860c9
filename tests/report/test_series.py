import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.report import series

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(np.nan), st.just(np.inf))


@settings(max_examples=30, deadline=None)
@given(arrays(np.float64, st.integers(1, 400), elements=VALUES), st.integers(1, 40))
def test_extremes_keep_the_highest_and_lowest_of_every_bin(values_T, num_bins):
    kept = series.extremes(values_T, num_bins)

    assert np.all(np.diff(kept) > 0)
    assert kept[0] == 0
    assert kept[-1] == len(values_T) - 1
    assert len(kept) <= max(2 * num_bins + 2, 2)
    finite = values_T[np.isfinite(values_T)]
    if finite.size:
        left = values_T[kept][np.isfinite(values_T[kept])]
        assert left.max() == finite.max()
        assert left.min() == finite.min()


def test_copies_that_rounding_alone_sets_apart_are_not_apart():
    copies_TW = np.array([[0.3, 0.1 + 0.2, 0.3], [0.7, 0.7, 0.1 * 7]])
    assert np.ptp(copies_TW, axis=1).min() > 0
    rows = series.deviations(copies_TW)
    assert [(row["value"], row["low"], row["high"]) for row in rows] == [(0.0, 0.0, 0.0)] * 3
    apart = series.deviations(np.array([[1.0, 1.0 + 1e-4]] * 3))
    np.testing.assert_allclose([row["value"] for row in apart], [-5e-5, 5e-5], rtol=1e-3)
