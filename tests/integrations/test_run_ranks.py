import importlib
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from integrations.adapters import assert_same_metrics
from integrations.run_commands import RUN, SCRIPTS, start, start_on_ranks
from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import watch
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]


OWN_LINES = [f"root: rank {rank} has trained" for rank in range(2)]
"""What ``train_plain.py`` logs to its standard output, sorted."""


def neighbour():
    """Import what the scripts import; on ranks only."""
    sys.path.insert(0, str(SCRIPTS))
    return importlib.import_module("plain_training")


def by_hand(rank, folder):
    """Train as the scripts do: without a monitor, then with one that is told the loss by hand."""
    scripts, digests = neighbour(), {}
    for kind in ("ddp", "fsdp2"):
        model, optimizer = scripts.build(kind)
        scripts.train(rank, model, optimizer)
        digests[kind] = scripts.digest(model)
        model, optimizer = scripts.build(kind)
        with watch(model, optimizer, run_dir=Path(folder) / kind, canary=False) as scope:
            scripts.train(rank, model, optimizer, scope.loss)
    return digests


def train_in_phases(rank):
    neighbour()
    return importlib.import_module("train_in_phases").train_all(rank)


@pytest.fixture(scope="module")
def digests(folder):
    return run_ranks(by_hand, 2, str(folder), timeout=240)


def assert_silent_but_for_the_end(ended):
    verdict, recorded = [x for x in ended.stderr.splitlines() if x.startswith("rankscope: ")]
    assert "of 2 workers: no fault found" in verdict
    assert recorded.startswith("rankscope: the run is recorded in")


def told(folder, name, rank):
    return json.loads(Path(f"{folder / name}.{rank}").read_text())


def assert_the_scripts_own(folder, words, digests):
    kind, output, _ = words
    for rank in range(2):
        seen = told(folder, Path(output).name, rank)
        assert seen["argv"] == words
        assert seen["path"][0] == str(SCRIPTS)
        assert not any("startup" in path for path in seen["path"])
        assert seen["hooked"] == []
        assert seen["digest"] == digests[rank][kind]


def test_an_fsdp2_script_that_ends_with_a_code(folder, digests):
    words, run_dir = ["fsdp2", str(folder / "a b"), "exit 3"], folder / "watched fsdp2"
    ended = start_on_ranks(run_dir, SCRIPTS / "train_plain.py", *words)
    assert ended.returncode == 3
    assert sorted(ended.stdout.splitlines()) == OWN_LINES
    assert ended.stderr.count("rankscope: the run is recorded in") == 1
    assert "nothing was watched" not in ended.stderr
    assert_the_scripts_own(folder, words, digests)
    run = Run.open(run_dir)
    assert_same_metrics(run, Run.open(folder / "fsdp2"), status="incomplete")


def test_a_ddp_script_on_two_hosts_whose_launcher_is_part_of_the_command(folder, digests, tmp_path):
    """As on hosts without a common disk: where no run is written, nothing is said of it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    words = ["ddp", str(tmp_path / "h"), "destroy"]

    def on_host(number):
        meet = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "localhost"]
        launch = ["torchrun", *meet, "--master-port", port, "--nproc-per-node", "1"]
        (tmp_path / f"temporary {number}").mkdir()
        variables = {"TMPDIR": str(tmp_path / f"temporary {number}")}
        run = [*RUN, "--run-dir", str(tmp_path / f"host {number}" / "run"), "--", *launch]
        return start(*run, str(SCRIPTS / "train_plain.py"), *words, **variables)

    with ThreadPoolExecutor(2) as hosts:
        ended = list(hosts.map(on_host, range(2)))
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert [each.stdout.splitlines() for each in ended] == [[line] for line in OWN_LINES]
    assert ended[0].stderr.count("rankscope: the run is recorded in") == 1
    assert "rankscope: " not in ended[1].stderr
    assert not (tmp_path / "host 1").exists()
    assert list(tmp_path.glob("temporary */rankscope-run-*")) == []
    assert_the_scripts_own(tmp_path, words, digests)
    run = Run.open(tmp_path / "host 0" / "run")
    assert_same_metrics(run, Run.open(folder / "ddp"))
    assert np.isfinite(run.per_worker("loss")[1]).all()
    assert (run.per_worker("grad_scale")[1] == 1024).all()
    assert (run.per_worker("optimizer_steps")[1] == 1).all()


def test_a_script_that_starts_its_own_ranks(folder, digests):
    run_dir, store = folder / "watched spawn", str(folder / "spawning ranks meet")
    script, output = str(SCRIPTS / "train_spawning.py"), str(folder / "s")
    ended = start(*RUN, "--run-dir", str(run_dir), "--", "python", script, store, output)
    assert ended.returncode == 0, ended.stderr
    assert_silent_but_for_the_end(ended)
    assert [told(folder, "s", rank)["digest"] for rank in range(2)] == [
        digest["ddp"] for digest in digests
    ]
    assert_same_metrics(Run.open(run_dir), Run.open(folder / "ddp"))


ALONE = """
import torch
from torch import nn

model = nn.Linear(3, 1)
x = torch.ones(2, 3, requires_grad=True)
x.square().sum().backward()  # trains nothing
before = torch.autograd._make_grads
for _ in range(3):
    model(x).sum().backward()
assert torch.autograd._make_grads is not before, "left behind"
"""


def test_processes_that_train_without_a_process_group_are_told_so_by_name(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    ended = start_on_ranks(tmp_path / "run", script)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert ended.stderr.count("rankscope: ") == 1, ended.stderr
    why = "each of 2 processes (WORLD_SIZE) trained a model of its"
    assert f"rankscope: nothing was watched: {why}" in ended.stderr


def test_a_script_that_raises_in_torch_has_the_same_traceback(tmp_path):
    script = str(SCRIPTS / "train_and_fail.py")
    plain = start(sys.executable, script, str(tmp_path / "one"))
    run_dir = tmp_path / "run"
    watched = start(*RUN, "--run-dir", str(run_dir), script, str(tmp_path / "two"))
    assert watched.returncode == plain.returncode == 1
    assert "second time" in plain.stderr
    assert watched.stdout == plain.stdout != ""
    lines = watched.stderr.splitlines(keepends=True)
    own = [line for line in lines if line.startswith("rankscope: ")]
    assert "".join(line for line in lines if line not in own) == plain.stderr
    (place,) = [line for line in own if "rankscope report" in line]
    assert place.startswith("rankscope: the training ended with an error")
    assert Run.open(run_dir).status == "incomplete"


def test_one_training_after_the_other_in_a_run_of_its_own(tmp_path):
    """A new model is watched from its third step on; one in a new wrapper from its first."""
    script, run_dir = SCRIPTS / "train_in_phases.py", tmp_path / "run"
    ended = start_on_ranks(run_dir, script, str(tmp_path / "watched"))
    assert ended.returncode == 0, ended.stderr
    assert [told(tmp_path, "watched", rank) for rank in range(2)] == run_ranks(train_in_phases, 2)
    runs = [Run.open(tmp_path / name) for name in ("run", "run-2", "run-3")]
    assert [len(run.columns(Table.STEPS, "step")["step"]) for run in runs] == [6, 4, 5]
    assert [run.status for run in runs] == ["complete"] * 3
    assert not any("continues" in run.info for run in runs)
    assert ended.stderr.count("of 2 workers: no fault found") == 3, ended.stderr
