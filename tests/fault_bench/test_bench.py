"""The bench itself, on real ranks: faults of three kinds, a healthy job, and ranks that fail."""

from dataclasses import replace

import pytest
from benchmarks.faults.bench import Bench
from benchmarks.faults.catalogue import catalogue
from benchmarks.faults.job import Trial
from benchmarks.faults.pool import WorkerPool

from rankscope import Run
from rankscope.bus.evidence import Table

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def bench(folder):
    with Bench(folder) as bench:
        yield bench


@pytest.mark.parametrize(
    ("name", "steps", "delay"),
    [("D5", 8, 0), ("D1", 32, 31), ("T2", 24, 10), ("D25", 44, 20), ("D26", 8, 4), ("M4", 4, 0)],
)
def test_a_fault_is_found_within_some_steps_with_its_cause_and_worker(
    bench, folder, name, steps, delay
):
    score = bench.run(catalogue()[name], num_steps=steps)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay <= delay
    assert list(folder.glob(f"{name}-w4-s0*"))


def test_a_healthy_job_raises_notes_at_most(bench, folder):
    score = bench.run(catalogue()["H33"], num_steps=24)
    assert score.problem == ""
    assert score.as_expected
    assert not score.false_alarms
    steps = Run.open(folder / "H33-w4-s0").columns(Table.STEPS, "step")["step"]
    assert len(steps) == 24


def test_a_rank_that_raises_is_reported_and_the_workers_are_made_anew(tmp_path):
    with WorkerPool(2) as pool:
        broken = Trial("nothing", 2, 0, 4, 2, tmp_path / "broken")
        outcome = pool.run(broken, timeout=60)
        assert outcome.directories == ()
        assert "KeyError" in outcome.problem
        outcome = pool.run(replace(broken, fault="D5", run_dir=tmp_path / "sound"), timeout=60)
    assert outcome.problem == ""
    assert outcome.directories == (tmp_path / "sound",)


def test_ranks_that_hang_are_ended(tmp_path):
    with WorkerPool(2) as pool:
        outcome = pool.run(Trial("D5", 2, 0, 100, 2, tmp_path / "run"), timeout=0.05)
        assert "did not finish" in outcome.problem
        assert not pool._processes
