"""TRL's ``GRPOTrainer`` on two real ranks, with rollouts of an engine in another precision."""

import importlib
import json
import sys
import warnings

import numpy as np
import pytest

from integrations.adapters import run_in
from integrations.run_commands import SCRIPTS, start_on_ranks
from rankscope.bus.finding import Severity

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

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
    run = run_in(tmp_path, "run")
    gaps_TW = np.array(
        [json.loads((tmp_path / "out" / f"gaps {rank}").read_text()) for rank in (0, 1)]
    ).T
    np.testing.assert_allclose(run.per_worker("rollout_gap")[1][1:], gaps_TW[1:], rtol=1e-2)
    found = [f for f in run.findings() if f.severity > Severity.NOTE]
    assert [(f.cause, f.ranks) for f in found] == [("rollout.worker_outlier", (1,))]
    assert STALE_FROM <= found[0].first_step <= STALE_FROM + 5
