"""Bounded parts of long tables, what a run says of its samples, and whether it has changed."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope.bus.evidence import Table
from rankscope.errors import RunError, UsageError
from rankscope.record import Run, RunWriter, rollups, tables, writer
from rankscope.record.schema import arrow_schema
from rankscope.stats import draws
from rankscope.stats.draws import DistinctSamples
from record.run_files import make_finding
from record.step_reports import make_report

STEPS = 90


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 90 steps in many parts, each with several row groups."""
    path = tmp_path_factory.mktemp("bounded") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PART_BYTES", 20_000)
        made = RunWriter(path, {"num_workers": 4})
        for step in range(STEPS):
            made.add(make_report(step, groups=True))
            if step % 3 == 2:
                made.flush()
        made.close()
    return Run.open(path)


def test_frames_are_evenly_chosen_and_equal_to_the_recorded_ones(run):
    steps_T, cosines_TWW = run.cosines()
    few, few_TWW = run.cosines(max_frames=7)
    assert few.tolist() == [0, 14, 29, 44, 59, 74, 89]
    np.testing.assert_array_equal(few_TWW, cosines_TWW[np.isin(steps_T, few)])
    for many in (STEPS, 10 * STEPS):
        np.testing.assert_array_equal(run.cosines(max_frames=many)[1], cosines_TWW)


@pytest.mark.parametrize("flushes", range(1, 18))
def test_frames_of_a_run_that_grows_meanwhile_are_those_that_were_asked_for(
    tmp_path, monkeypatch, flushes
):
    made = RunWriter(tmp_path / "run", {"num_workers": 4})
    for step in range(flushes):
        made.add(make_report(step))
        made.flush()
    steps_T, cosines_TWW = Run.open(made.path).cosines()
    count = tables._num_rows

    def count_then_grow(file):
        counted = count(file)
        made.add(make_report(flushes))
        made.flush()  # every fourth one merges row groups
        return counted

    monkeypatch.setattr(tables, "_num_rows", count_then_grow)
    few, few_TWW = Run.open(made.path).cosines(max_frames=3)
    assert few.tolist() == sorted({0, (flushes - 1) // 2, flushes - 1})
    np.testing.assert_array_equal(few_TWW, cosines_TWW[np.isin(steps_T, few)])


def test_a_run_without_pairs_has_no_frames(tmp_path):
    alone = RunWriter(tmp_path / "run", {"num_workers": 1})
    alone.add(make_report(0, 1))
    alone.close()
    steps_T, cosines_TWW = Run.open(alone.path).cosines(max_frames=5)
    assert (steps_T.shape, cosines_TWW.shape) == ((0,), (0, 1, 1))


def test_the_latest_rows_are_those_of_whole_steps_at_the_end(run):
    whole = run.columns(Table.GROUPS)
    for most in (150, 400):  # 12 rows a step, 3 steps a flush, up to 4 flushes a row group
        latest = run.latest(Table.GROUPS, max_rows=most)
        count = len(latest["step"])
        assert 0 < count <= most
        assert count % 12 == 0
        for name, column in latest.items():
            np.testing.assert_array_equal(column, whole[name][-count:])
    assert run.latest(Table.GROUPS, "step", max_rows=1)["step"][-1] == STEPS - 1
    everything = run.latest(Table.GROUPS, "step", max_rows=10**6)
    np.testing.assert_array_equal(everything["step"], whole["step"])
    assert len(run.latest(Table.TRACES, "step")["step"]) == 0


def test_an_even_choice_has_whole_steps_from_the_whole_run(run):
    whole = run.columns(Table.WORKERS, "step", "rank", "loss")
    few = run.sampled(Table.WORKERS, "step", "rank", "loss", max_rows=100)
    assert len(few["step"]) <= len(whole["step"]) / 2
    assert few["step"][0] < 10
    assert few["step"][-1] > STEPS - 10
    for name, column in few.items():
        np.testing.assert_array_equal(column, whole[name][np.isin(whole["step"], few["step"])])
    every = run.sampled(Table.WORKERS, "step", "rank", "loss", max_rows=10**6)
    np.testing.assert_array_equal(every["loss"], whole["loss"])
    with pytest.raises(UsageError, match="expected columns of workers"):
        run.sampled(Table.WORKERS, "nothing", max_rows=1)


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
    made = RunWriter(tmp_path / "run", {"num_workers": 4})
    for step in range(200):
        made.add(make_report(step))
    made.close()
    run = Run.open(made.path)
    counted = run.coverage()
    assert counted.step_B.tolist() == [63, 127, 191]
    assert counted.drawn_B.tolist() == [9 * 64, 9 * 128, 9 * 192]
    rows = run.columns(Table.SAMPLES, "step", "samples")
    for step, distinct in zip(counted.step_B, counted.distinct_B, strict=True):
        drawn = np.concatenate(list(rows["samples"][rows["step"] <= step]))
        assert distinct == len(set(drawn.tolist()))
    assert counted.is_exact
    np.testing.assert_array_equal(
        np.sort(run.sample_ids()), np.sort(np.concatenate(rows["samples"]))
    )


def test_a_run_without_samples_says_nothing_of_them(tmp_path):
    made = RunWriter(tmp_path / "run", {"num_workers": 4})
    for step in range(64):
        made.add(make_report(step, samples=False))
    made.close()
    assert Run.open(made.path).coverage() is None
    assert len(Run.open(made.path).sample_ids()) == 0


@pytest.mark.parametrize("repeats", [1, 3])
def test_equally_frequent_samples_are_counted_exactly_beyond_the_capacity(repeats):
    samples = DistinctSamples(capacity=256)
    for _ in range(repeats):
        for first in range(0, 20_000, 100):
            samples.add(np.arange(first, first + 100))
    assert not samples.is_exact
    assert (samples.drawn, samples.distinct()) == (repeats * 20_000, 20_000)


def test_samples_of_unequal_frequency_are_estimated():
    rng = np.random.default_rng(0)
    drawn = np.minimum(rng.geometric(1e-5, 400_000), 200_000) * 7919
    samples = DistinctSamples(capacity=4096)
    for part in np.array_split(drawn, 100):
        samples.add(part)
    true = len(np.unique(drawn))
    assert samples.distinct() == pytest.approx(true, rel=4 / np.sqrt(4096 / 2))
    assert samples.distinct() != true


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
    made = RunWriter(tmp_path / "run", {"num_workers": 4})
    for step in range(100):
        made.add(make_report(step, groups=True))
    made.close()
    run = Run.open(made.path)
    for table in (Table.STEPS, Table.WORKERS, Table.SAMPLES, Table.GROUPS, Table.PAIRS):
        rows = pq.read_table(made.path / table)
        files = [*(made.path / table).glob("part-*.parquet")]
        for file in files:
            file.unlink()
        pq.write_table(rows, made.path / table / "part-000000.parquet", row_group_size=len(rows))
        assert pq.read_metadata(made.path / table / "part-000000.parquet").num_row_groups == 1
    monkeypatch.setattr(tables, "PIECE_VALUES", 30)
    monkeypatch.setattr(tables, "LARGE_ROWS", 40)
    monkeypatch.setattr(tables, "_MOST_ROWS", 40)
    return run


def test_pieces_are_the_part(one_group):
    for table in (Table.STEPS, Table.WORKERS, Table.GROUPS, Table.PAIRS):
        for file in tables.parts_in(one_group.path / table):
            schema = arrow_schema(table)
            pieces = [*tables.read_pieces(file, schema)]
            assert len(pieces) > 3
            assert pa.concat_tables(pieces).equals(tables.read_part(file, schema))
            assert max(map(len, pieces)) <= 30


def test_whole_steps_of_one_row_group_are_chosen_evenly(one_group):
    rows = one_group.sampled(Table.WORKERS, "step", "rank", max_rows=80)
    assert rows["step"].tolist() == np.repeat(np.arange(0, 100, 5), 4).tolist()
    assert rows["rank"].tolist() == [0, 1, 2, 3] * 20


def test_the_end_of_one_row_group_is_read(one_group):
    every = one_group.columns(Table.GROUPS, "step", "rank", "group", "grad_norm")
    last = one_group.latest(Table.GROUPS, "step", "rank", "group", "grad_norm", max_rows=50)
    number = len(last["step"])
    assert 50 <= number <= 80
    for name, values in last.items():
        np.testing.assert_array_equal(values, every[name][-number:])


@pytest.mark.parametrize("number", [7, 12])  # of 12, one begins a piece
def test_single_rows_of_one_row_group_are_found(one_group, number):
    steps, cosines = one_group.cosines()
    few, chosen = one_group.cosines(max_frames=number)
    assert len(few) == number
    assert (few[0], few[-1]) == (steps[0], steps[-1])
    np.testing.assert_array_equal(chosen, cosines[np.isin(steps, few)])


def test_one_row_group_of_workers_is_seen_whole_in_pieces(one_group, monkeypatch):
    for bins in (240, 10):
        whole = one_group.overview("loss", max_bins=bins)
        with monkeypatch.context() as limited:
            limited.setattr(rollups, "MAX_ROWS", 50)
            limited.setattr(rollups, "read_rows", None)
            pieces = Run.open(one_group.path).overview("loss", max_bins=bins)
        assert pieces.last_B[-1] == whole.last_B[-1] == 99
        assert np.nanmin(pieces.low_BW) == np.nanmin(whole.low_BW)
        assert np.nanmax(pieces.high_BW) == np.nanmax(whole.high_BW)


def test_samples_are_counted_again_in_pieces(one_group):
    counted, ids = one_group.count_samples(), one_group.sample_ids()
    assert one_group.num_samples >= len(ids) > 0
    assert counted.drawn_B[-1] == len(ids)
    assert counted.distinct_B[-1] == len(set(ids.tolist()))
    assert counted.step_B[-1] == 99
    assert counted.is_exact


def test_too_many_rows_in_a_step_are_refused(one_group):
    rows = pa.table({"step": np.zeros(1000, np.int64), "rank": np.zeros(1000, np.int64)})
    file = one_group.path / Table.WORKERS / "part-000000.parquet"
    pq.write_table(rows, file)
    with pytest.raises(RunError, match=r"rows in 1 steps, and so many are not read"):
        one_group.sampled(Table.WORKERS, "step", max_rows=100)
