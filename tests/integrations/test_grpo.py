"""TRL's ``GRPOTrainer`` on two real ranks, with rollouts of an engine in another precision."""

import importlib
import json
import logging
import os
import sys
import tempfile
import warnings

import numpy as np
import pytest

from integrations.adapter_runs import OPTIONS, bits, run_in
from integrations.run_commands import SCRIPTS, start_on_ranks
from rankscope.bus.finding import Severity
from support.loops import collect_warnings
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STALE_FROM, STEPS = 8, 26
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


def work(rank, folder):
    """Train in three ways on one rank; return bits of the model and what the engine computed."""
    os.environ.update(  # as under a launcher
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost"
    )
    os.environ.update(MASTER_PORT="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    said = collect_warnings()
    script = importlib.import_module("train_grpo")
    from rankscope.integrations.transformers import RankscopeCallback

    logging.getLogger("transformers").setLevel(logging.ERROR)

    def train(name, *more):
        words = [*SETTINGS, "--output_dir", f"{folder}/out", *more]
        watching = [RankscopeCallback(f"{folder}/{name}", **OPTIONS)] if name else []
        engine = script.Engine(rank)
        trainer = script.make_trainer(script.parse(words), engine, watching)
        trainer.train()
        return bits(trainer.model), engine.gaps, sorted(vars(trainer))

    aligned = ["--max_steps", "5", "--gradient_accumulation_steps", "2"]
    return {
        "unwatched": train("", *aligned),
        "aligned": train("aligned", *aligned),
        "said": list(said),
    }


@pytest.fixture(scope="module")
def trained():
    with tempfile.TemporaryDirectory() as folder:
        yield folder, run_ranks(work, 2, folder, timeout=240, prepare=import_all)


def expected(ranks, name):
    return np.array([rank[name][1] for rank in ranks]).T


def test_the_gap_of_every_step_is_that_of_its_rollouts(trained):
    """Two micro-batches a step; the trainer's log-probabilities are those that the loss computes.

    Against passes of one completion each, in float64 from the logits on.
    """
    folder, ranks = trained
    _, gaps_TW = run_in(folder, "aligned").per_worker("rollout_gap")
    np.testing.assert_allclose(gaps_TW, expected(ranks, "aligned"), rtol=1e-2)
    assert gaps_TW.min() > 1e-5


def test_no_bit_of_the_training_changes_and_the_trainer_is_left_as_it_was(trained):
    for rank in trained[1]:
        (unwatched, _, members), (watched, _, left) = rank["unwatched"], rank["aligned"]
        assert unwatched == watched
        assert members == left
        assert rank["said"] == []


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
    run = run_in(tmp_path, "run")
    seen = [json.loads((tmp_path / "out" / f"seen {rank}").read_text()) for rank in (0, 1)]
    gaps_TW = np.array([each["gaps"] for each in seen]).T
    np.testing.assert_allclose(run.per_worker("rollout_gap")[1][1:], gaps_TW[1:], rtol=1e-2)
    found = [f for f in run.findings() if f.severity > Severity.NOTE]
    assert [(f.cause, f.ranks) for f in found] == [("rollout.worker_outlier", (1,))]
    assert STALE_FROM <= found[0].first_step <= STALE_FROM + 5
