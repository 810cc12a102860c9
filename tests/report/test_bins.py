import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rankscope.record import Overview
from rankscope.record.rollups import thinned

VALUES = st.one_of(st.floats(-1e3, 1e3), st.just(np.nan))


def overview(values_TW: np.ndarray, width: int = 1) -> Overview:
    """Bin steps in a plain loop."""
    starts = list(range(0, len(values_TW), width))
    parts = [values_TW[start : start + width] for start in starts]

    def reduced(reduce) -> np.ndarray:
        cells = [
            [reduce(part[np.isfinite(part[:, w]), w]) for w in range(part.shape[1])]
            for part in parts
        ]
        return np.array(cells, np.float64).reshape(len(parts), values_TW.shape[1])

    def known(reduce):
        return lambda values: reduce(values) if len(values) else np.nan

    ends = [min(start + width, len(values_TW)) - 1 for start in starts]
    return Overview(
        first_B=np.array(starts, np.int64),
        last_B=np.array(ends, np.int64),
        count_BW=reduced(len).astype(np.int64),
        mean_BW=reduced(known(np.mean)),
        low_BW=reduced(known(np.min)),
        high_BW=reduced(known(np.max)),
    )


@settings(max_examples=30, deadline=None)
@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=30), elements=VALUES),
    st.integers(1, 12),
)
def test_merged_bins_keep_the_extremes_of_every_worker(values_TW, max_bins):
    view = overview(values_TW)
    merged = thinned(view, max_bins)

    assert len(merged.first_B) <= min(max_bins, len(values_TW))
    assert merged.first_B[0] == 0
    assert merged.last_B[-1] == len(values_TW) - 1
    np.testing.assert_array_equal(merged.first_B[1:], merged.last_B[:-1] + 1)
    for first, last, low_W, high_W in zip(
        merged.first_B, merged.last_B, merged.low_BW, merged.high_BW, strict=True
    ):
        part = overview(values_TW[first : last + 1], len(values_TW))
        np.testing.assert_array_equal(low_W, part.low_BW[0])
        np.testing.assert_array_equal(high_W, part.high_BW[0])
