import numpy as np
import pytest
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


def test_frames_begin_with_the_mean_of_what_is_defined():
    cosines_TWW = np.random.default_rng(1).uniform(-1, 1, (4, 3, 3))
    cosines_TWW[2, 0, 1] = np.nan
    cosines_TWW[:, 2, 2] = np.nan

    labels, rows = series.frames(np.array([3, 5, 7, 9]), cosines_TWW)

    assert labels == ["mean of 4 steps", "step 3", "step 5", "step 7", "step 9"]
    assert [row["frame"] for row in rows] == [0, 1, 2, 3, 4]
    kept = [cosines_TWW[t, 0, 1] for t in (0, 1, 3)]
    assert rows[0]["cosines"][1] == pytest.approx(np.mean(kept), rel=1e-2)
    assert rows[0]["cosines"][8] is None
    assert rows[3]["cosines"][1] is None
    assert rows[2]["cosines"][5] == pytest.approx(cosines_TWW[1, 1, 2], rel=1e-2)


def test_of_many_workers_the_named_and_the_farthest_are_drawn():
    values_TW = np.random.default_rng(2).normal(0, 0.01, (50, 1024))
    values_TW[:, 700] += 3.0
    values_TW[0, 5] = np.nan

    drawn = series.chosen_workers(values_TW, named=[17, 901])

    assert {17, 901, 700} <= set(drawn)
    assert len(drawn) == len(set(drawn)) <= series.MAX_LINES
    assert drawn == sorted(drawn)


def test_deviations_are_mean_and_standard_error_of_the_distance_to_the_steps_mean():
    values_TW = np.random.default_rng(4).normal(size=(20, 4)) + np.arange(20)[:, None]
    values_TW[3, 1] = np.nan
    values_TW[:, 2] = np.inf

    rows = series.deviations(values_TW)

    assert [row["rank"] for row in rows] == [0, 1, 3]
    apart = []
    for step in range(20):
        others = [values_TW[step, rank] for rank in (0, 1, 3)]
        finite = [value for value in others if np.isfinite(value)]
        apart.append(values_TW[step, 0] - sum(finite) / len(finite))
    error = np.std(apart, ddof=1) / np.sqrt(20)
    assert rows[0]["value"] == pytest.approx(np.mean(apart), rel=1e-5)
    assert rows[0]["low"] == pytest.approx(np.mean(apart) - error, rel=1e-5)
    assert rows[0]["high"] == pytest.approx(np.mean(apart) + error, rel=1e-5)
