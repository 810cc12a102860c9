import importlib
import json
import sys
import warnings

import numpy as np
import pytest
import torch

from integrations.run_commands import RUN, SCRIPTS, start_on_ranks
from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.verdict.assessment import assess
from rankscope.verdict.coverage import coverage_of
from support.findings import faults
from support.forked_ranks import run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# A pipeline -------------------------------------------------------------------------------------


def test_each_stage_of_a_pipeline_by_hand_is_watched_and_none_waits_for_another(tmp_path):
    script = str(SCRIPTS / "train_pipeline.py")
    places = [tmp_path / "plain", tmp_path / "watched"]
    for place in places:
        place.mkdir()
    command = [*RUN[3:], "--run-dir", str(tmp_path / "run"), script]
    plain = run_on_ranks(4, [script], SCRIPTS, script=True, TRAINED=str(places[0]))
    watched = run_on_ranks(4, command, SCRIPTS, TRAINED=str(places[1]))
    assert (plain[0], watched[0]) == (0, 0), (plain, watched)
    for rank in range(4):
        one, other = (torch.load(place / f"{rank}.pt") for place in places)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for name, ranks in {"run": [0, 2], "run-from-rank-1": [1, 3]}.items():
        run = Run.open(tmp_path / name)
        assert (run.status, run.info["job"]["ranks"]) == ("complete", ranks)
        assert run.columns(Table.STEPS, "step")["step"].tolist() == list(range(6))
        assert assess(run).severity is None


@pytest.mark.parametrize(
    "words", [(), ("own",), ("sum",)], ids=["by all", "by its own", "of a sum"]
)
def test_a_pipeline_that_clips_by_the_norm_of_one_stage_is_found(tmp_path, words):
    script = str(SCRIPTS / "train_stages.py")
    command = [*RUN[3:], "--run-dir", str(tmp_path / "run"), "--verify-at", "4", script, *words]
    code, out, err = run_on_ranks(4, command, SCRIPTS)
    assert code == 0, err
    for name in ("run", "run-from-rank-1"):
        run = Run.open(tmp_path / name)
        assert run.status == "complete"
        assert list(faults(run)) == (["clip-norm-of-stage"] if "own" in words else [])
    losses = run.columns(Table.WORKERS, "loss", "loss_weight", "grad_scale")
    assert np.isfinite(losses["loss"]).all()
    [line] = [line for line in out.splitlines() if "losses" in line]
    of_micro = np.array(line.split("losses")[1].split(), float).reshape(-1, 2)
    _, recorded_TW = run.per_worker("loss")
    np.testing.assert_allclose(recorded_TW[:, 0], of_micro.mean(axis=1), rtol=1e-5)
    if "sum" not in words:
        assert set(losses["loss_weight"].tolist()) == {8.0}  # of both micro-batches
    assert "as clipping does" in " ".join(f.explanation for f in run.findings())


# ``GRPOTrainer`` with rollouts of an engine in another precision --------------------------------

STALE_FROM, STEPS = 8, 40
SETTINGS = [
    *("--per_device_train_batch_size", "4", "--num_generations", "2", "--seed", "1"),
    *("--max_completion_length", "8", "--lr_scheduler_type", "constant"),
    *("--learning_rate", "1e-2", "--use_cpu", "--bf16", "false", "--disable_tqdm", "True"),
    *("--logging_strategy", "no", "--save_strategy", "no", "--report_to", "none"),
    *("--dataloader_pin_memory", "False"),
]


def import_all():
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SCRIPTS))
    importlib.import_module("train_grpo")


def test_an_engine_that_gets_no_new_weights_is_found_in_an_unmodified_script(tmp_path):
    """Of two workers, the one with the larger gap is at fault; the first step is not yet seen."""
    words = [*SETTINGS, "--max_steps", str(STEPS), "--output_dir", str(tmp_path / "out")]
    ended = start_on_ranks(
        *(tmp_path / "run", SCRIPTS / "train_grpo.py", *words),
        prepare=import_all,
        HF_HUB_OFFLINE="1",
        STALE_FROM=str(STALE_FROM),
    )
    assert ended.returncode == 0, ended.stderr
    run = Run.open(tmp_path / "run")
    files = [tmp_path / "out" / f"gaps {rank}" for rank in (0, 1)]
    gaps_TW = np.transpose([json.loads(file.read_text()) for file in files])
    np.testing.assert_allclose(run.per_worker("rollout_gap")[1][1:], gaps_TW[1:], rtol=1e-2)
    [found] = faults(run).values()
    assert (found.cause, found.ranks) == ("rollout.worker_outlier", (1,))
    assert STALE_FROM <= found.first_step <= STALE_FROM + 5


@pytest.mark.parametrize("words", [(), ("reduces",)], ids=["alone", "reduced by hand"])
def test_a_second_model_that_nobody_wraps_is_named(tmp_path, words):
    ended = start_on_ranks(tmp_path / "run", SCRIPTS / "train_half_wrapped.py", *words)
    assert ended.returncode == 0, ended.stderr
    run = Run.open(tmp_path / "run")
    assert "2 of the 4 trained tensors watched, without Linear.bias and Linear.weight" in (
        coverage_of(run).limits
    )
    assert set(faults(run)) == (
        set() if words else {"state.unwatched_differs:Linear.bias and Linear.weight"}
    )
    if words:
        assert "Give a second model a wrapper of its own" in assess(run).recommendation


EVALUATING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
model.train(dist.get_rank() == 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    for micro in range(2):
        (model(torch.randn(4, 4)).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_rank_in_evaluation_mode_lets_no_other_wait(tmp_path):
    (tmp_path / "script.py").write_text(EVALUATING)
    ended = start_on_ranks(tmp_path / "run", tmp_path / "script.py")
    assert ended.returncode == 0, ended.stderr
    run = Run.open(tmp_path / "run")
    assert run.num_rows(Table.STEPS) == 7  # all but the first
    assert "compute.modes_differ" in faults(run)
