"""Steps read back from a record have the bits that detectors saw when they were live."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.step import GatheredStep, as_recorded
from rankscope.errors import RunError
from rankscope.record import Run, RunWriter
from record.run_files import record
from record.step_reports import local_values, make_differences, make_report
from support.same import assert_same

W = 4
NAMES = ("embedding", "layers.0", "layers.1", "head")


def live_step(step, width):
    rng = np.random.default_rng([step, width])
    workers = {**local_values(step, width), "num_samples": rng.integers(0, 9, width)}
    workers["grad_norm"][0] = np.inf if step % 5 else np.nan
    observed = step % 3 < 2
    lengths = [[0] * width, [1] * width, [2] * width, rng.integers(0, 5, width)][step % 4]
    sketches = rng.normal(size=(width, 31)).astype(np.float32) + 0.5
    if step % 7 == 0:
        sketches[0] = 0.0
    if step % 5 == 0:
        sketches[-1, 3] = np.nan
    narrow = rng.normal(size=(width, len(NAMES), 11)).astype(np.float32)
    narrow[:, : step % 2] = np.nan
    residuals = rng.random((width, len(NAMES)))  # what an audit finds: in some steps, parts of it
    residuals[rng.random(residuals.shape) < (1.0 if step % 5 == 1 else 0.3)] = np.nan
    return GatheredStep(
        step=step,
        time=1.7e9 + 0.1 * step,
        observed=observed,
        workers=workers,
        sketches_WK=sketches if observed else None,
        samples=tuple(rng.integers(-(2**63), 2**63, rng.integers(0, 4)) for _ in range(width))
        if step % 6
        else tuple(np.empty(0, np.int64) for _ in range(width)),
        micro_losses=tuple(rng.normal(size=n) for n in lengths),
        micro_weights=tuple(rng.normal(size=n) for n in lengths),
        micro_norms=tuple(
            np.where(rng.random(n) < 0.5, np.nan, 1.0) * (1 if observed else np.nan)
            for n in lengths
        ),
        micro_scales=tuple(np.full(n, np.nan) if step % 9 == 2 else rng.random(n) for n in lengths),
        differences=make_differences(step, width) if step % 2 else (),
        groups=NAMES if observed else (),
        group_norms_WG=rng.random((width, len(NAMES))) if observed else None,
        group_sketches_WGK=narrow if observed and step % 4 else None,
        residuals_WG=residuals if observed and step % 5 else None,
        total_residuals_W=rng.random(width) if observed else None,
        interval=1 + step % 2,
    )


@pytest.mark.parametrize("width", [1, 8])
def test_reports_come_back_as_detectors_saw_them(tmp_path, width):
    live = [summarize(live_step(step, width)) for step in range(40)]
    run = record(tmp_path / "run", live, flush_every=7)
    for read, report in zip(run.iter_reports(), live, strict=True):
        assert_same(read, as_recorded(report))
        assert_same(as_recorded(read), read)


def test_from_a_later_step_on_earlier_rows_are_not_even_read(tmp_path, monkeypatch):
    monkeypatch.setattr("rankscope.record.writer.PART_BYTES", 1_000)
    live = [summarize(live_step(step, 3)) for step in (0, 1, 2, 5, 9, 10, 11)]
    run = record(tmp_path / "run", live, flush_every=1)
    for first, expected in [(0, 7), (3, 4), (5, 4), (6, 3), (11, 1), (12, 0)]:
        reports = list(run.iter_reports(first))
        assert len(reports) == expected
        for read, report in zip(reports, live[len(live) - expected :], strict=True):
            assert_same(read, as_recorded(report))
    for table in ("steps", "workers", "samples", "groups"):
        file = min((run.path / table).iterdir())
        data = bytearray(file.read_bytes())
        data[8:40] = bytes(32)  # the rows of the first part, not its footer
        file.write_bytes(data)
    assert [report.step for report in run.iter_reports(5)] == [5, 9, 10, 11]
    with pytest.raises(RunError, match="it is damaged"):
        list(run.iter_reports())


def test_steps_that_are_written_meanwhile_are_left_out(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(4):
        writer.add(make_report(step))
        writer.flush()
    steps = []
    for report in Run.open(writer.path).iter_reports():
        steps.append(report.step)
        writer.add(make_report(10 + report.step))
        writer.flush()
    assert steps == [0, 1, 2, 3]


def test_a_step_without_workers_is_damage(tmp_path):
    run = record(tmp_path / "run", map(make_report, range(3)))
    file = run.path / "workers" / "part-000000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 2 * W), file)
    with pytest.raises(RunError, match=r"rows of step 2 are damaged \(it lacks the workers\)"):
        list(run.iter_reports())
