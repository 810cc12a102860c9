import importlib
import json
import socket
import sys
from pathlib import Path

import pytest

from rankscope.cli import main
from support.forked_ranks import run_on_ranks, torchrun

HERE = Path(__file__).parent
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def launched(*command):
    return torchrun(["--nproc-per-node", "2"], *command, folder=HERE, COLUMNS="110")


def prepare():
    """Import once what all ranks need; they measure their speed only as often as it takes."""
    sys.path.insert(0, str(HERE))
    importlib.import_module("patients")
    importlib.import_module("rankscope.tools.doctor.preflight")
    speed = importlib.import_module("rankscope.tools.doctor.collectives")
    speed.ROUNDS = speed.MOST_REPETITIONS = 2


def examine(num_ranks, *options, seconds=60, form="--json"):
    words = ["doctor", *options, f"--seconds={seconds}", *filter(None, [form])]
    return run_on_ranks(num_ranks, words, HERE, prepare=prepare)


def checks(out):
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_a_healthy_job_is_ready():
    code, out, err = examine(2, "--model=patients:healthy", "--loader=patients:sharded")
    assert code == 0, err
    assert [line for line in err.splitlines() if line.startswith("rankscope doctor: ")][:2] == [
        "rankscope doctor: Ranks and devices …",
        "rankscope doctor: Environment …",
    ]
    found = checks(out)
    names = "topology environment process_group collectives repeatability bandwidth parameters"
    names += " buffers optimizer random_numbers shards batch_counts loss_weighting"
    assert {name: check["status"] for name, check in found.items() if name != "stragglers"} == {
        **dict.fromkeys(names.split(), "ok"),
        "batch_norm": "note",
        "epoch_order": "note",
        "determinism": "skipped",  # its model does not take these batches
    }
    assert found["process_group"]["numbers"]["backend"] == "gloo"
    assert found["topology"]["numbers"]["ranks"] == 2
    assert found["shards"]["numbers"]["distinct"] == found["shards"]["numbers"]["drawn"] == 96
    assert "sampler.set_epoch" in found["epoch_order"]["found"]


def test_faults_are_named_with_their_rank():
    functions = ["--optimizer=patients:optimizer", "--loader=patients:unsharded"]
    code, out, err = examine(3, "--model=patients:perturbed", *functions)
    assert code == 1, err
    found = checks(out)
    named = ("parameters", "buffers", "optimizer", "shards")
    assert [found[name]["status"] for name in named] == ["error", "ok", "error", "error"]
    assert [found[name]["ranks"] for name in ("parameters", "optimizer")] == [[2], [1]]
    assert found["parameters"]["numbers"]["different"] == ["3.weight"]
    assert "lr: 0.1 on ranks 0 and 2, 0.3 on rank 1" in found["optimizer"]["found"]
    assert found["shards"]["numbers"]["same_batches"] == [[0, 1, 2]]


def test_steps_that_do_not_repeat_are_named_with_rank_and_operator():
    code, out, err = examine(2, "--model=patients:on_rank_1", "--loader=patients:sharded")
    assert code == 0, err
    determinism = checks(out)["determinism"]
    assert (determinism["status"], determinism["ranks"]) == ("warning", [1])
    assert "patients::sum_in_any_order in the forward pass" in determinism["found"]
    assert "No flag of torch changes that" in determinism["advice"]


def test_a_function_that_raises_on_one_rank_does_not_end_the_rest():
    code, out, err = examine(2, "--model=patients:raises", "--loader=patients:uneven", form="")
    assert code == 1
    assert "rank 1: ValueError: no checkpoint (patients.py:" in out
    assert "rank 0 has 6 batches, others up to 9" in " ".join(out.split())
    assert "Not ready: 2 checks failed (model and optimizer, batch counts)." in out
    assert out.count("Not ready") == 1
    assert "Not ready" not in err


def test_a_rank_that_hangs_is_named_with_its_line():
    code, out, _ = examine(2, "--model=patients:hangs", seconds=10)
    assert code == 1
    model = checks(out)["model"]
    assert model["status"] == "error"
    assert model["ranks"] == [1]
    assert "rank 1 did not finish within 10 s and is at patients.py:" in model["found"]
    assert model["found"].endswith("in hangs")
    assert checks(out)["collectives"]["status"] == "ok"
    assert checks(out)["loader"]["status"] == "skipped"


def test_a_rank_that_never_comes_is_named():
    code, out, _ = launched(str(HERE / "never_comes.py"), "--json", "--seconds=6")
    assert code == 1
    topology = checks(out)["topology"]
    assert topology["status"] == "error"
    assert topology["ranks"] == [1]
    assert topology["found"] == "rank 1 did not start within 6 s; 1 of 2 came"


def test_a_rank_that_dies_is_named():
    command = ["-m", "rankscope", "doctor", "--json", "--model=patients:dies", "--seconds=60"]
    code, out, _ = launched(*command)
    assert code == 1
    model = checks(out)["model"]
    assert model["ranks"] == [1]
    assert model["found"].startswith("rank 1 ended without a word")


# Alone, in this process


@pytest.fixture
def alone(monkeypatch, capfd):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["rankscope", "doctor", *options])
        with pytest.raises(SystemExit) as ended:
            main.run()
        return (ended.value.code, *capfd.readouterr())

    return call


def test_alone_it_says_so(alone):
    code, out, err = alone("--json", "--model=patients:chatty", "--loader=patients:one_pass")
    assert code == 0
    found = checks(out)  # what the function printed is not in it
    assert found["topology"]["status"] == "note"
    assert "started without a launcher" in found["topology"]["found"]
    assert found["parameters"]["status"] == "ok"
    assert found["shards"]["status"] == "skipped"
    assert found["batch_counts"]["found"] == "4 batches on each rank"
    assert "once only" in found["epoch_order"]["found"]
    assert {"chatter on stdout", "chatter on stderr", "chatter of a child"} <= {*err.splitlines()}


def test_a_warning_fails_only_when_asked(alone):
    options = ("--loader=patients:unshuffled",)
    assert alone(*options)[0] == 0
    code, out, _ = alone(*options, "--fail-on=warning")
    assert code == 1
    assert "Can start, but look at 1 warning first (epoch order)." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model=patients"], "--model expected MODULE:FUNCTION, got 'patients'"),
        (["--model=nothere:f"], "--model nothere:f: there is no module 'nothere' here"),
        (["--optimizer=patients:optimizer"], "--optimizer needs --model"),
        (["--model=patients:not_a_model"], "it returned int"),
    ],
)
def test_bad_usage(alone, options, message):
    code, out, err = alone(*options)
    assert (code, out) == (2, "")
    assert message in err
    assert "\nrankscope: " in f"\n{err}"  # the checks before it are named, too


def test_a_rank_that_cannot_reach_the_others_says_so(alone, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    code, out, err = alone("--seconds=0.5")
    assert (code, out) == (2, "")
    assert err.startswith(f"rankscope: rank 1 cannot reach rank 0 at 127.0.0.1:{port}")
    assert len(err.splitlines()) == 1
