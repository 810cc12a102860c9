"""Every command of ``benchmarks/`` runs in its smallest setting, here or in another test."""

import gc
import importlib
import os
import runpy
import sys
from pathlib import Path

import pytest

from support.benchmarks import FOLDER
from support.ranks import forked

SMALL = {
    "agent_cost": "--workers 2 --steps 4 --batch 1",
    "audit": "--parts limits --sizes 10000",
    "compiled": "--ranks 1 --blocks 1 --warm-up 0 --backend eager --width 8",
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
    "bench": "test_benchmarks",
    "chaos": "test_chaos",
    "detection": "test_benchmarks",
    "diff_pairs": "cli/test_diff_command",
    "field": "integrations/test_field",
    "gpu": "test_gpu_script",
    "launches": "gradients/test_launches",
    "live_page": "test_benchmarks",
    "outside": "test_benchmarks",
    "peers": "test_benchmarks",
    "rounding_growth": "study/test_rounding",
    "scale": "test_benchmarks",
    "several_gpus": "test_several_gpus",
    "steps": "test_benchmarks",
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
    "detection_faults detection_null detection_outside": "are parts of detection.py",
    "chaos_training detection_training hosts_serving outside_jobs parity_training": "are processes"
    " that other benchmarks start",
}


def fork_ranks():
    """Let ranks be forks of this process, which has imported what they need."""
    starting = importlib.import_module("torch.multiprocessing.spawn")
    start = starting.start_processes

    def fork(work, args=(), nprocs=1, start_method=""):
        return start(work, args, nprocs, start_method="fork")

    starting.spawn = starting.start_processes = fork


def main_of(script, words, folder):
    """Be the process of a command; its output goes to a file."""
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
    others = {name for names in NOT_HERE for name in names.split()}
    assert scripts == SMALL.keys() | ELSEWHERE.keys() | others
    for test in ELSEWHERE.values():
        assert "benchmark" in (Path(__file__).parent / f"{test}.py").read_text()
