import shutil

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from rankscope.bus.evidence import Table
from rankscope.record import Run, RunWriter, rollups, tables, writer
from rankscope.stats import draws
from rankscope.stats.draws import DistinctSamples
from record.run_files import make_finding, record
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
        ends = steps_T[inside][[0, -1]]
        mean = np.nansum(part, axis=0) / counts
        rows.append((*ends, mean, np.fmin.reduce(part), np.fmax.reduce(part)))
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
        steps = pl.col("step").is_between(row["step"], row["last_step"])
        inside = workers.filter(steps, pl.col("rank") == row["rank"])
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


@pytest.fixture(scope="module")
def run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PART_BYTES", 20_000)
        return record(folder / "parts", (make_report(step, groups=True) for step in range(90)), 3)


def test_frames_are_evenly_chosen_and_equal_to_the_recorded_ones(run):
    steps_T, cosines_TWW = run.cosines()
    few, few_TWW = run.cosines(max_frames=7)
    assert few.tolist() == [0, 14, 29, 44, 59, 74, 89]
    np.testing.assert_array_equal(few_TWW, cosines_TWW[np.isin(steps_T, few)])
    for many in (90, 900):
        np.testing.assert_array_equal(run.cosines(max_frames=many)[1], cosines_TWW)


def test_the_latest_rows_are_those_of_whole_steps_at_the_end(run):
    whole = run.columns(Table.GROUPS)
    for most in (150, 400):  # 12 rows a step, 3 steps a flush, up to 4 flushes a row group
        latest = run.latest(Table.GROUPS, max_rows=most)
        count = len(latest["step"])
        assert 0 < count <= most
        assert count % 12 == 0
        for name, column in latest.items():
            np.testing.assert_array_equal(column, whole[name][-count:])
    assert run.latest(Table.GROUPS, "step", max_rows=1)["step"][-1] == 89
    everything = run.latest(Table.GROUPS, "step", max_rows=10**6)
    np.testing.assert_array_equal(everything["step"], whole["step"])
    assert len(run.latest(Table.TRACES, "step")["step"]) == 0


def test_the_version_changes_with_flushes_findings_and_the_end(tmp_path):
    made = RunWriter(tmp_path / "run", {"num_workers": 4})
    run = Run.open(made.path)
    seen = [run.version]
    assert run.version == seen[0]

    made.add(make_report(0))
    assert run.version == seen[-1]  # in memory only
    for change in (made.flush, lambda: made.add_findings([make_finding()]), made.close):
        change()
        assert run.version not in seen
        assert run.version == Run.open(made.path).version
        seen.append(run.version)


# Samples -----------------------------------------------------------------------------------------


def test_samples_are_counted_as_the_run_goes_on(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(200)))
    counted = run.coverage()
    assert counted.step_B.tolist() == [63, 127, 191]
    assert counted.drawn_B.tolist() == [9 * 64, 9 * 128, 9 * 192]
    rows = run.columns(Table.SAMPLES, "step", "samples")
    for step, distinct in zip(counted.step_B, counted.distinct_B, strict=True):
        drawn = np.concatenate(list(rows["samples"][rows["step"] <= step]))
        assert distinct == len(set(drawn.tolist()))
    assert counted.is_exact
    assert sorted(run.sample_ids()) == sorted(np.concatenate(rows["samples"]))


def test_memory_stays_bounded(monkeypatch):
    samples = DistinctSamples(capacity=100)
    for first in range(0, 10_000, 50):
        samples.add(np.arange(first, first + 50))
        assert len(samples._hashes) <= 100
        assert samples._num_waiting < 150
    assert draws.CAPACITY == 65_536


# One row group of any size -----------------------------------------------------------------------


@pytest.fixture
def one_group(tmp_path, monkeypatch):
    """Return a run whose tables are one row group each, of which little is read at a time."""
    run = record(tmp_path / "run", (make_report(step, groups=True) for step in range(100)))
    for table in (Table.STEPS, Table.WORKERS, Table.SAMPLES, Table.GROUPS, Table.PAIRS):
        rows = pq.read_table(run.path / table)
        for file in (run.path / table).glob("part-*.parquet"):
            file.unlink()
        pq.write_table(rows, run.path / table / "part-000000.parquet", row_group_size=len(rows))
        assert pq.read_metadata(run.path / table / "part-000000.parquet").num_row_groups == 1
    monkeypatch.setattr(tables, "PIECE_VALUES", 30)
    monkeypatch.setattr(tables, "LARGE_ROWS", 40)
    monkeypatch.setattr(tables, "_MOST_ROWS", 40)
    return run


def test_whole_steps_of_one_row_group_are_chosen_evenly(one_group):
    rows = one_group.sampled(Table.WORKERS, "step", "rank", max_rows=80)
    assert rows["step"].tolist() == np.repeat(np.arange(0, 100, 5), 4).tolist()
    assert rows["rank"].tolist() == [0, 1, 2, 3] * 20


@pytest.mark.parametrize("number", [7, 12])  # of 12, one begins a piece
def test_single_rows_of_one_row_group_are_found(one_group, number):
    steps, cosines = one_group.cosines()
    few, chosen = one_group.cosines(max_frames=number)
    assert len(few) == number
    assert (few[0], few[-1]) == (steps[0], steps[-1])
    np.testing.assert_array_equal(chosen, cosines[np.isin(steps, few)])


def test_samples_are_counted_again_in_pieces(one_group):
    counted, ids = one_group.count_samples(), one_group.sample_ids()
    assert one_group.num_samples >= len(ids) > 0
    assert counted.drawn_B[-1] == len(ids)
    assert counted.distinct_B[-1] == len(set(ids.tolist()))
    assert counted.step_B[-1] == 99
    assert counted.is_exact
    shutil.rmtree(one_group.path / "rollups")
    again = one_group.coverage()
    assert (again.drawn_B[-1], again.distinct_B[-1]) == (len(ids), counted.distinct_B[-1])
    shutil.rmtree(one_group.path / "samples")
    assert not len(one_group.coverage().step_B)
