import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.report import series
from rankscope.report.series import BinnedGroups

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


def groups_of(norms_SGW: np.ndarray, cosines_GW: np.ndarray | None = None) -> BinnedGroups:
    """Return the groups of a run whose table has these norms, by step, group and worker."""
    num_steps, *shape = norms_SGW.shape
    at_R = np.repeat(np.arange(num_steps), shape[0] * shape[1])
    cells_R = np.tile(np.arange(shape[0] * shape[1]), num_steps)
    known_GW = (~np.isnan(norms_SGW)).sum(axis=0)
    means_GW = np.nansum(norms_SGW, axis=0) / np.maximum(known_GW, 1)
    return BinnedGroups(
        names=[f"layers.{index}" for index in range(shape[0])],
        norm_GW=np.where(known_GW > 0, means_GW, np.nan),
        cosine_GW=np.full(shape, np.nan) if cosines_GW is None else cosines_GW,
        absent_GW=series.absent(at_R, cells_R, norms_SGW.ravel(), (shape[0], shape[1])),
        num_steps=num_steps,
        last_step=num_steps - 1,
    )


def marks_of(norms_SGW: np.ndarray) -> list[list[str]]:
    return [row["mark"] for row in series.norm_rows(groups_of(norms_SGW))]


def test_a_group_without_gradient_on_one_worker_is_marked_and_not_left_blank():
    norms_SGW = np.ones((5, 3, 3))
    norms_SGW[1:, 0, 0] = 0
    norms_SGW[2:, 1, 1] = np.nan  # beside groups of this worker that are known
    norms_SGW[3:, 2, 2] = 0  # in fewer than half of the steps
    assert marks_of(norms_SGW) == [["0", "", ""], ["", "0", ""], ["", "", ""]]
    frozen, *_ = series.norm_rows(groups_of(norms_SGW))
    assert frozen["deviation"] == [None, 0, 0]
    cosines_GW = np.array([[np.nan, 0.4, 0.5], [0.3, np.nan, 0.4], [0.3, 0.4, np.nan]])
    directions = series.direction_rows(groups_of(norms_SGW, cosines_GW))
    assert [row["mark"] for row in directions] == [["0", "", ""], ["", "0", ""], ["", "", "–"]]


def test_a_worker_that_was_not_observed_looks_otherwise_and_so_does_a_frozen_group():
    norms_SGW = np.ones((5, 2, 3))
    norms_SGW[:, :, 1] = np.nan
    assert marks_of(norms_SGW) == [["", "–", ""], ["", "–", ""]]
    norms_SGW = np.ones((5, 2, 3))
    norms_SGW[:, 0] = 0  # on all: nothing of it is trained
    assert marks_of(norms_SGW) == [["", "", ""]]


def test_of_many_workers_a_cell_shows_the_one_without_gradient():
    norms_SGW = np.ones((2, 1, 128))
    norms_SGW[:, 0, 7] = 0
    norms_SGW[:, 0, 6] = 1000
    (row,) = series.norm_rows(groups_of(norms_SGW))
    assert (row["rank"][3], row["mark"][3], len(row["mark"])) == (7, "0", series.MAX_ROWS)
