"""Bounded parts of long tables, what a run says of its samples, and whether it has changed."""

import numpy as np
import pytest

from rankscope.core import share as core_share
from rankscope.core.share import DistinctSamples
from rankscope.core.signals import Table
from rankscope.record import Run, RunWriter, tables, writer
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
    with pytest.raises(KeyError):
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
    assert core_share.CAPACITY == 65_536
