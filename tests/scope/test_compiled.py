"""``torch.compile`` around and inside DDP, before and after ``watch``."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from support.mode_runs import STEPS, ModeRun, train_in_modes
from support.modes import Mode
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

COMPILED = [
    Mode("inside DDP", {}, compiled="inside DDP", accumulate=2),
    Mode("around DDP", {}, compiled="around DDP", accumulate=2),
    Mode("around DDP, after watch", {}, compiled="around DDP, after watch"),
]


def train_compiled(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    results = {}
    for mode in COMPILED:
        torch._dynamo.reset()
        results |= train_in_modes(rank, [mode], folder)
    return results


@pytest.fixture(scope="module", params=[2, 3], ids=["W=2", "W=3"])
def runs(request):
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train_compiled, request.param, folder, timeout=240)
        yield {
            mode.name: ModeRun([rank[mode.name] for rank in ranks], mode, Path(folder))
            for mode in COMPILED
        }


@pytest.mark.parametrize("mode", COMPILED, ids=lambda mode: mode.name)
def test_compiled_models_are_measured_and_left_alone(runs, mode):
    run = runs[mode.name]
    assert run.steps.tolist() == list(range(STEPS))
    run.check_bits()
    run.check_norms_and_losses()
    run.check_reduced_norm()
    run.check_reduction()
    run.check_groups()
    run.check_micro_batches()
