import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.benchmarks import FOLDER, load_benchmark
from support.ranks import forked, run_ranks

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "benchmark"), [("performance", "bench"), ("detection", "detection_pages")]
)
def test_a_page_is_of_the_results(name, benchmark):
    results = json.loads((ROOT / "docs" / f"{name}.json").read_text())
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert of_any_machine(load_benchmark(benchmark).render(results)) == of_any_machine(page)


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
    return seconds, steps.measure_own_cost(variants[0], 16, 2, optimize=True)


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


SMALL = {
    "agent_cost": "--workers 2 --steps 4 --batch 1",
    "audit": "--parts limits --sizes 10000",
    "compiled": "--ranks 1 --blocks 1 --warm-up 0 --backend eager --width 8",
    "drawn_jobs": "--seeds 2:3 --only healthy",
    "evidence": "--pairs 1",
    "hosts": "--parts start --times 1",
    "in_turns": "--model 2_layers --ranks 1 --blocks 1 --warm-up 0",
    "kernel": "--pairs 1 --bytes 1000000",
    "memory": "--cases 1 --ranks 1 --steps 1 --tokens 16",
    "order_free": "--ranks 1 2 --steps 1 --width 8",
    "parity_cost": "--rounds 1 --steps 1 --workers 1 --width 20",
    "parity_pairs": "--only accumulation_1_and_2* --steps 1",
    "parity_reports": "--only R72",
    "probe_cost": "--model 2_layers --steps 1 --no-parts",
    "reference_step": "--rounds 1 --tokens 16 --micro 2",
    "reproducible": "--parts times --ranks 2 --pairs 1 --tokens 16",
    "sinks_cost": "",
    "sketch_error": "--seeds 1",
    "traces": "--rounds 1 --tokens 16",
    "watched": "--only R35|H08",
}
"""Words of the command line by benchmark; ``_`` stands for a space."""

ELSEWHERE = {
    "bench chaos detection live_page outside peers scale steps": "test_benchmarks",
    "diff_pairs": "cli/test_diff_command",
    "field": "integrations/test_field",
    "fuzz": "test_fuzz",
    "gpu several_gpus": "test_gpu_script",
    "launches": "gradients/test_launches",
    "rounding_growth": "study/test_rounding",
}
"""Tests that run, in small, what these commands run."""

IN_NEW_PROCESSES = ("memory",)
"""Their ranks need a library that has to be there from the start; those of all others are forks."""

WITHOUT_A_COMPILER = ("reference_step",)
"""They count no memory then, for which they need that library, too."""

NOT_HERE = {
    "mutants": "runs the tests themselves, for hours",
    "gallery pictures": "draw what minutes of the fault bench have recorded",
    "parity_frameworks": "needs the environments of other frameworks",
    "drawn_training drawn_frameworks drawn_layouts": "are what drawn_jobs.py runs",
    "detection_faults detection_null detection_outside": "are parts of detection.py",
    "chaos_training detection_training hosts_serving outside_jobs parity_training": "are processes"
    " that other benchmarks start",
}


def fork_ranks():
    starting = importlib.import_module("torch.multiprocessing.spawn")
    start = starting.start_processes

    def fork(work, args=(), nprocs=1, join=True, daemon=False, start_method=""):
        return start(work, args, nprocs, join, daemon, start_method="fork")

    starting.spawn = starting.start_processes = fork


def main_of(script, words, folder):
    os.chdir(folder)
    with (folder / "output").open("wb") as output:
        os.dup2(output.fileno(), 1)
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    sys.stdout = os.fdopen(1, "w")
    if script.stem not in IN_NEW_PROCESSES:
        fork_ranks()
    if script.stem in WITHOUT_A_COMPILER:
        os.environ["PATH"] = ""
    importlib.import_module("harness").Model.__init__.__defaults__ = (32, 1, 2048)  # not 10 M
    gc.freeze()  # or each watch() would look through all that the ranks share, and copy it
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_in_its_smallest_setting(tmp_path, name):
    words = [each.replace("_", " ") for each in SMALL[name].split()]
    process = forked().Process(target=main_of, args=(FOLDER / f"{name}.py", words, tmp_path))
    process.start()
    process.join(500)
    process.kill()
    process.join()
    printed = (tmp_path / "output").read_text()
    assert process.exitcode == 0, printed
    assert any(sign.isdigit() for line in printed.splitlines() for sign in line), printed


def test_every_benchmark_has_a_test_or_a_reason():
    scripts = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    others = {name for names in [*ELSEWHERE, *NOT_HERE] for name in names.split()}
    assert scripts == SMALL.keys() | others
    for test in ELSEWHERE.values():
        assert "benchmark" in (Path(__file__).parent / f"{test}.py").read_text()


BUSY = {"RANKSCOPE_CHAOS_PATIENCE": "12"}
"""Other tests run beside it: its bounds of time are those of a quiet machine."""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_and_a_killed_agent_keep_their_promises():
    ended = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--quick", "--only", "kill"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **BUSY},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert said.count("good") == 2, said
