"""Roll-ups: what the writer makes of many steps, and overviews that are read from them."""

import numpy as np
import polars as pl
import pytest

from rankscope.record import Run, RunWriter, rollups, writer
from record.run_files import record
from record.step_reports import make_report

W = 3
FIRST = 1000  # not the first step of a bin
STEPS = 700


def reports(count, first=FIRST):
    return (make_report(step, W) for step in range(first, first + count))


@pytest.fixture(scope="module")
def finished(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PART_BYTES", 50_000)
        return record(folder / "run", reports(STEPS), 37).path


def by_hand(path, name, width):
    """Return first and last step, mean, smallest and largest of bins, straight from the rows."""
    steps_T, values_TW = Run.open(path).per_worker(name)
    rows = []
    for key in np.unique(steps_T // width):
        inside = steps_T // width == key
        part = values_TW[inside]
        known = np.isfinite(part)
        counts = np.where(known.any(axis=0), known.sum(axis=0), np.nan)
        part = np.where(known, part, np.nan)
        rows.append(
            (
                steps_T[inside][0],
                steps_T[inside][-1],
                np.nansum(part, axis=0) / counts,
                np.fmin.reduce(part),
                np.fmax.reduce(part),
            )
        )
    return [np.array(column) for column in zip(*rows, strict=True)]


def assert_is(view, expected):
    first, last, mean, low, high = expected
    np.testing.assert_array_equal(view.first_B, first)
    np.testing.assert_array_equal(view.last_B, last)
    np.testing.assert_allclose(view.mean_BW, mean, rtol=1e-12)
    np.testing.assert_array_equal(view.low_BW, low)
    np.testing.assert_array_equal(view.high_BW, high)


# What is rolled up -------------------------------------------------------------------------------


def test_each_row_of_a_roll_up_is_a_whole_bin_of_one_worker(finished):
    rows = pl.read_parquet(f"{finished}/rollups/64/*.parquet")
    spans = rows.select("step", "last_step", "rank").rows()
    firsts = [FIRST, *range(1024, 1600, 64), 1600]
    assert spans == [(first, first // 64 * 64 + 63, rank) for first in firsts for rank in range(W)]
    wide = pl.read_parquet(f"{finished}/rollups/512/*.parquet")
    assert wide.select("step", "last_step", "rank").rows() == [
        (first, last, rank) for first, last in ((FIRST, 1023), (1024, 1535)) for rank in range(W)
    ]
    workers = pl.read_parquet(f"{finished}/workers/*.parquet")
    for row in [*rows.iter_rows(named=True), *wide.iter_rows(named=True)]:
        inside = workers.filter(
            pl.col("step").is_between(row["step"], row["last_step"]), pl.col("rank") == row["rank"]
        )
        for name in ("loss", "cosine_rest", "num_samples"):
            values = inside[name].drop_nulls()
            assert row[f"{name}_count"] == len(values)
            assert row[f"{name}_mean"] == pytest.approx(values.mean(), rel=1e-12)
            ends = float(values.min()), float(values.max())
            assert (row[f"{name}_low"], row[f"{name}_high"]) == ends


# Overviews ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bins", [700, 240, 5, 1])
def test_an_overview_holds_what_the_rows_hold(finished, monkeypatch, max_bins):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0 if max_bins < 700 else rollups.MAX_ROWS)
    width = {700: 1, 240: 64, 5: 256, 1: 2048}[max_bins]
    views = Run.open(finished).overviews("loss", "num_samples", max_bins=max_bins)
    for name, view in views.items():
        assert len(view.first_B) <= max_bins
        assert_is(view, by_hand(finished, name, width))


def test_a_run_that_is_not_closed_is_told_to_its_last_flush(tmp_path, monkeypatch):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0)
    run = RunWriter(tmp_path / "run", {"num_workers": W})
    for number, report in enumerate(reports(260, first=0), start=1):
        run.add(report)
        if number % 20 == 0:
            run.flush()
            view = Run.open(run.path).overview("loss", max_bins=6)
            assert view.last_B[-1] == number - 1
            assert_is(view, by_hand(run.path, "loss", 64 if number > 6 else 1))
