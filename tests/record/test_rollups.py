"""Roll-ups: what the writer makes of many steps, and overviews that are read from them."""

import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from rankscope.bus.evidence import DType, Table
from rankscope.errors import UsageError
from rankscope.evidence import columns_of
from rankscope.record import Run, RunWriter, rollups, writer
from rankscope.record.rollup_values import (
    bin_width,
    bins_of_steps,
    joined,
    quantities,
    rollup_signals,
)
from record.step_reports import make_report

W = 3
FIRST = 1000  # not the first step of a bin
STEPS = 700


def reports(count, first=FIRST):
    return (make_report(step, W) for step in range(first, first + count))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of steps 1000 to 1699, written in flushes of 37 steps and parts of a few steps."""
    path = tmp_path_factory.mktemp("rollups") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PART_BYTES", 50_000)
        run = RunWriter(path, {"num_workers": W})
        for number, report in enumerate(reports(STEPS), start=1):
            run.add(report)
            if number % 37 == 0:
                run.flush()
        run.close()
    return path


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


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


def test_amounts_are_rolled_up_and_names_and_digests_are_not():
    names = {signal.name for signal in quantities()}
    assert {"loss", "grad_norm", "cosine_rest", "step_seconds", "num_samples"} <= names
    assert not names & {"step", "rank", "batch_digest", "precision", "nonfinite", "replica"}
    floats = {s.name for s in columns_of(Table.WORKERS) if s.dtype is DType.FLOAT}
    assert floats <= names
    rolled_up = [s.name for s in rollup_signals()]
    first = rolled_up.index("loss_count")
    assert rolled_up[first : first + 4] == [
        f"loss_{end}" for end in ("count", "mean", "low", "high")
    ]


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


def test_a_short_run_has_no_roll_ups(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    for report in reports(20):
        run.add(report)
    run.close()
    assert not (run.path / "rollups").exists()


def test_values_that_are_not_finite_count_as_missing(tmp_path):
    run = RunWriter(tmp_path / "run", {"num_workers": W})
    for step in range(64):
        report = make_report(step, W)
        loss = np.array([np.inf if step == 5 else 2.0, np.nan, float(step)])
        workers = {**report.gathered.workers, "loss": loss}
        run.add(replace(report, gathered=replace(report.gathered, workers=workers)))
    run.close()
    names = [f"loss_{end}" for end in ("count", "mean", "low", "high")]
    rows = pl.read_parquet(f"{run.path}/rollups/64/*.parquet").select(names).rows()
    assert rows == [(63, 2.0, 2.0, 2.0), (0, None, None, None), (64, 31.5, 0.0, 63.0)]


def test_other_workers_begin_another_bin(tmp_path):
    run = RunWriter(tmp_path / "run", {})
    for step in range(64):
        run.add(make_report(step, 2 if step < 10 else 4))
    run.close()
    rows = pl.read_parquet(f"{run.path}/rollups/64/*.parquet").select("step", "last_step", "rank")
    assert rows.rows() == [(0, 9, 0), (0, 9, 1), *((10, 63, rank) for rank in range(4))]


# Overviews ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bins", [700, 240, 12, 11, 5, 2, 1])
def test_an_overview_holds_what_the_rows_hold(finished, monkeypatch, max_bins):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0 if max_bins < 700 else rollups.MAX_ROWS)
    width = {700: 1, 240: 64, 12: 64, 11: 128, 5: 256, 2: 1024, 1: 2048}[max_bins]
    views = Run.open(finished).overviews("loss", "num_samples", max_bins=max_bins)
    for name, view in views.items():
        assert len(view.first_B) <= max_bins
        assert_is(view, by_hand(finished, name, width))


def test_a_run_that_is_read_whole_has_narrow_bins(finished):
    view = Run.open(finished).overview("loss")
    assert_is(view, by_hand(finished, "loss", 4))


def test_without_roll_ups_the_rows_give_the_same(copy, monkeypatch):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0)
    rolled = Run.open(copy).overview("cosine_rest")
    shutil.rmtree(copy / "rollups")
    assert_is(Run.open(copy).overview("cosine_rest"), by_hand(copy, "cosine_rest", 64))
    assert len(rolled.first_B) == 12


def test_only_the_end_of_the_rows_is_read_beside_roll_ups(copy, monkeypatch):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0)
    expected = by_hand(copy, "loss", 64)
    parts = sorted((copy / "workers").iterdir())
    assert len(parts) > 6
    for part in parts[1:-3]:  # step 1663 is the last one in a bin, 1699 the last one
        part.write_bytes(b"damaged")
    assert_is(Run.open(copy).overview("loss"), expected)


def test_what_roll_ups_lack_comes_from_the_rows(copy, monkeypatch):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0)
    for file in (copy / "rollups").glob("*/part-*"):
        rows = pq.read_table(file)
        pq.write_table(rows.drop_columns([n for n in rows.column_names if "loss_" in n]), file)
    run = Run.open(copy)
    assert_is(run.overview("loss"), by_hand(copy, "loss", 64))
    assert_is(run.overview("grad_norm"), by_hand(copy, "grad_norm", 64))


def test_flags_and_digests_have_an_overview_of_their_rows(finished, monkeypatch):
    monkeypatch.setattr(rollups, "MAX_ROWS", 0)
    view = Run.open(finished).overview("nonfinite")
    assert_is(view, by_hand(finished, "nonfinite", 64))


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


def test_an_empty_run_has_an_empty_overview(tmp_path):
    RunWriter(tmp_path / "run", {"num_workers": W}).close()
    view = Run.open(tmp_path / "run").overview("loss")
    assert view.first_B.shape == (0,)
    assert view.mean_BW.shape == (0, W)


def test_unknown_columns_are_refused(finished):
    with pytest.raises(UsageError, match="no_such_column"):
        Run.open(finished).overview("no_such_column")


# The mathematics ---------------------------------------------------------------------------------


def test_bins_of_bins_are_bins_of_steps():
    rng = np.random.default_rng(0)
    values_TW = rng.normal(size=(300, 4))
    values_TW[rng.random(values_TW.shape) < 0.3] = np.nan
    values_TW[:, 3] = np.inf
    steps = bins_of_steps(np.arange(300) + 5, values_TW)
    twice, once = steps.merged(8).merged(64), steps.merged(64)
    np.testing.assert_array_equal(twice.first_B, once.first_B)
    np.testing.assert_array_equal(twice.last_B, once.last_B)
    np.testing.assert_array_equal(twice.count_BW, once.count_BW)
    np.testing.assert_allclose(twice.mean_BW, once.mean_BW, rtol=1e-12)
    np.testing.assert_array_equal(twice.low_BW, once.low_BW)
    np.testing.assert_array_equal(twice.high_BW, once.high_BW)
    assert np.isnan(once.mean_BW[:, 3]).all()
    assert not once.count_BW[:, 3].any()


def test_parts_of_other_numbers_of_workers_are_joined():
    one = bins_of_steps(np.array([0]), np.array([[1.0]]))
    two = bins_of_steps(np.array([1]), np.array([[2.0, 3.0]]))
    both = joined([one, two])
    np.testing.assert_array_equal(both.mean_BW, [[1.0, np.nan], [2.0, 3.0]])
    np.testing.assert_array_equal(both.count_BW, [[1, 0], [1, 1]])


@pytest.mark.parametrize(
    ("first", "last", "bins", "width"),
    [(0, 0, 1, 1), (0, 239, 240, 1), (0, 240, 240, 2), (0, 99_999, 240, 512), (63, 64, 1, 128)],
)
def test_widths_are_powers_of_two(first, last, bins, width):
    assert bin_width(first, last, bins) == width
