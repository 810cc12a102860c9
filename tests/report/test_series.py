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
