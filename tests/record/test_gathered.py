"""Steps read back as the workers reported them."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankscope.errors import RunError
from rankscope.record import Run, RunWriter
from record.step_reports import make_report

W = 4


def record(path, reports, info=None):
    writer = RunWriter(path, {"num_workers": W} if info is None else info)
    for report in reports:
        writer.add(report)
    writer.close()
    return Run.open(path)


def assert_same_step(read, original):
    assert (read.step, read.time, read.observed) == (
        original.step,
        original.time,
        original.observed,
    )
    assert read.sketches_WK is None
    assert read.workers.keys() == original.workers.keys()
    for name, values in original.workers.items():
        assert read.workers[name].dtype == values.dtype
        np.testing.assert_array_equal(read.workers[name], values)
    for name in ("samples", "micro_losses", "micro_weights"):
        for mine, theirs in zip(getattr(read, name), getattr(original, name), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


def varied_report(step, num_workers):
    report = make_report(
        step, num_workers, micro=2 + step % 3, observed=step % 4 == 0, samples=step % 3 > 0
    )
    if step % 5 == 0:  # no accumulation: not recorded, so not read
        return replace(report, gathered=replace(report.gathered, micro_losses=(), micro_weights=()))
    return report


@pytest.mark.parametrize(("num_workers", "num_steps"), [(1, 20), (4, 30), (7, 1500)])
def test_steps_come_back_as_gathered(tmp_path, num_workers, num_steps):
    reports = [varied_report(step, num_workers) for step in range(num_steps)]
    run = record(tmp_path / "run", reports)
    for read, report in zip(run.iter_gathered(), reports, strict=True):
        assert_same_step(read, report.gathered)


def test_workers_may_have_different_numbers_of_micro_batches(tmp_path):
    report = make_report(0, 3)
    lengths = [2, 0, 3]
    gathered = replace(
        report.gathered,
        micro_losses=tuple(np.arange(n) / 2 for n in lengths),
        micro_weights=tuple(np.arange(n) + 5.0 for n in lengths),
    )
    run = record(tmp_path / "run", [replace(report, gathered=gathered)])
    (read,) = run.iter_gathered()
    assert_same_step(read, gathered)


def test_steps_across_parts_and_gaps_in_the_numbering(tmp_path, monkeypatch):
    monkeypatch.setattr("rankscope.record.writer.PART_BYTES", 1_000)
    writer = RunWriter(tmp_path / "run", {})
    reports = [varied_report(step, 3) for step in (0, 1, 5, 6, 7, 20, 21, 22, 40)]
    for report in reports:
        writer.add(report)
        writer.flush()
    assert len(list((writer.path / "workers").iterdir())) > 2
    for read, report in zip(Run.open(writer.path).iter_gathered(), reports, strict=True):
        assert_same_step(read, report.gathered)


def test_steps_that_are_written_meanwhile_are_left_out(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(4):
        writer.add(make_report(step))
        writer.flush()
    steps = []
    for gathered in Run.open(writer.path).iter_gathered():
        steps.append(gathered.step)
        writer.add(make_report(10 + gathered.step))
        writer.flush()
    assert steps == [0, 1, 2, 3]


def test_a_step_without_workers_is_damage(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(3)))
    file = run.path / "workers" / "part-000000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 2 * W), file)
    with pytest.raises(RunError, match="lacks the workers of step 2"):
        list(run.iter_gathered())
