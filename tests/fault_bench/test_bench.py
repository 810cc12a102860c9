"""The bench itself, on real ranks: faults of three kinds, a healthy job, and ranks that fail."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.faults.bench import Bench
from benchmarks.faults.catalogue import catalogue
from benchmarks.faults.job import Trial
from benchmarks.faults.pool import WorkerPool

from rankscope import Run, Severity
from rankscope.bus.evidence import Table

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def bench(kept: Path) -> Iterator[Bench]:
    with Bench(kept) as bench:
        yield bench


def test_equal_batches_are_found_at_once(bench, kept):
    score = bench.run(catalogue()["D5"], num_steps=8)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay == 0
    assert score.findings[0].cause == "data.duplicate_batches"
    assert Run.open(kept / "D5-w4-s0").status == "complete"


def test_seeds_that_differ_are_found_within_an_epoch(bench):
    score = bench.run(catalogue()["D1"], num_steps=32)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay < 32
    assert score.findings[0].severity is Severity.ERROR


def test_a_wrong_checkpoint_is_found_and_its_worker_named(bench):
    score = bench.run(catalogue()["T2"], num_steps=24)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay <= 10
    assert score.findings[0].ranks == (1,)
    assert score.findings[0].severity is Severity.ERROR


@pytest.mark.parametrize(("name", "steps", "delay"), [("D25", 44, 20), ("D26", 8, 4)])
def test_what_one_worker_is_given_is_compared_with_the_others(bench, name, steps, delay):
    score = bench.run(catalogue()[name], num_steps=steps)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay <= delay


def test_a_router_whose_gradient_is_partial_over_its_axis_is_found_at_once(bench):
    score = bench.run(catalogue()["M4"], num_steps=4)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay == 0
    [finding] = score.findings
    assert (finding.id, finding.severity) == ("sync.partial_gradient:ep", Severity.ERROR)
    assert finding.evidence["parameters"] == [f"blocks.{n}.mlp.router.weight" for n in (0, 1)]


def test_a_healthy_job_raises_notes_at_most(bench, kept):
    score = bench.run(catalogue()["H33"], num_steps=24)
    assert score.problem == ""
    assert score.as_expected
    assert not score.false_alarms
    steps = Run.open(kept / "H33-w4-s0").columns(Table.STEPS, "step")["step"]
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
