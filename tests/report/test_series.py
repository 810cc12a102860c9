import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.report import series

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(np.nan), st.just(np.inf))


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


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 12), max_size=5)), max_size=30
    ).map(sorted)
)
def test_coverage_counts_like_a_set(rows):
    steps_R = np.array([step for step, _ in rows], dtype=np.int64)
    samples_R = [np.array(samples, dtype=np.int64) for _, samples in rows]

    seen: set[int] = set()
    drawn = 0
    expected: dict[int, tuple[int, int]] = {}
    for step, samples in rows:
        seen.update(samples)
        drawn += len(samples)
        if samples:
            expected[step] = (drawn, len(seen))

    counted = series.coverage(steps_R, samples_R)
    assert {row["step"]: (row["drawn"], row["distinct"]) for row in counted} == expected


def test_of_many_workers_the_named_and_the_farthest_are_drawn():
    values_TW = np.random.default_rng(2).normal(0, 0.01, (50, 1024))
    values_TW[:, 700] += 3.0
    values_TW[0, 5] = np.nan

    drawn = series.chosen_workers(values_TW, named=[17, 901])

    assert {17, 901, 700} <= set(drawn)
    assert len(drawn) == len(set(drawn)) <= series.MAX_LINES
    assert drawn == sorted(drawn)
