"""What `make bench` and its like run, in small; and their pages are of their results."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.benchmarks import load_benchmark
from support.ranks import run_ranks

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "benchmark"), [("performance", "bench"), ("detection", "detection_pages")]
)
def test_a_page_is_of_the_results(name, benchmark):
    results = json.loads((ROOT / "docs" / f"{name}.json").read_text())
    page = (ROOT / "docs" / f"{name}.md").read_text()
    rendered = load_benchmark(benchmark).render(results)
    assert of_any_machine(rendered) == of_any_machine(page)


def test_the_page_on_peers_is_of_the_results():
    peers = load_benchmark("peers")
    assert peers.render(json.loads(peers.RESULTS.read_text())) in peers.PAGE.read_text()


def test_every_workload_of_the_outside_measure_has_a_job():
    outside, jobs = load_benchmark("outside"), load_benchmark("outside_jobs")
    assert {workload.name for workload in outside.ALL} == set(jobs.JOBS)


def test_the_detection_bench_finds_a_large_shift_and_is_silent_about_a_healthy_job():
    faults = load_benchmark("detection_faults")
    [fault] = [fault for fault in faults.FAULTS if fault.words == "loss + 3.5 sd"]
    outcome = faults.simulate(fault, np.random.default_rng(1), settle=5)
    assert not outcome.before
    assert outcome.delay < 30
    assert outcome.last == {faults.FAULTY}
    assert faults.measure_healthy(100)["alarms"] == 0


def test_the_synthetic_run_of_the_live_page_can_be_read(tmp_path):
    load_benchmark("live_run").make_run(tmp_path / "run", 8, 32)
    run = Run.open(tmp_path / "run")
    assert run.per_worker("loss")[1].shape == (32, 8)
    assert run.table(Table.GROUPS).num_rows == 64


def of_any_machine(page):
    return [line for line in page.splitlines() if not line.startswith("torch ")]


def test_bytes_of_a_step_stay_within_bounds():
    scale = load_benchmark("scale")
    rows = [scale.measure(num_workers, 1) for num_workers in (8, 64, 1024)]
    assert all(0 < row.worker_bytes <= 150_000 for row in rows)
    assert rows[0].host_bytes == rows[0].root_bytes == 0
    assert rows[1].host_bytes > 8 * rows[1].worker_bytes  # forwarded as they are
    assert 127 * rows[2].host_bytes < rows[2].root_bytes <= 4_000_000
    table = [line for line in scale.render(rows).splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [8] * 5


def time_steps(rank, kind, variants):
    harness, steps = load_benchmark("harness"), load_benchmark("steps")
    harness.WARM_UP = steps.WARM_UP = 1
    steps.Model = partial(harness.Model, width=32)
    seconds = steps.time_variants(kind, variants, 16, 2)
    own = steps.measure_own_cost(variants[0], 16, 2, optimize=True)
    return seconds, own


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "variants"),
    [("DDP", [*load_benchmark("steps").VARIANTS, "naive"]), ("FSDP2", ["sketch"])],
    ids=["DDP", "FSDP2"],
)
def test_every_variant_of_a_step_is_timed(kind, variants):
    (seconds, own), _ = run_ranks(time_steps, 2, kind, variants)
    assert list(seconds) == ["plain", *variants]
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert own["bytes_per_step"] > 0
    assert own["overhead_milliseconds"] > 0
