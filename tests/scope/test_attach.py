"""Watching for a part of a training: the same bits, right numbers, and nothing left behind."""

import threading
from typing import Any

import numpy as np
import pytest
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.bus.evidence import Table
from support.modes import MODES, MORE_MODES, Training, assert_same_bits
from support.ranks import alone_and_watched

pytestmark = pytest.mark.ranks

STEPS = 14
WATCHED = (range(5, 9), range(11, 14))
NAMES = (
    "no_sync with bucket views",
    "shared reentrant checkpoints",
    "scaler, micro-batches, clipping",
)
_SHADOW = DistributedDataParallel._match_all_reduce_for_bwd_pass


def train(rank: int, name: str, run_dir: str | None) -> dict[str, Any]:
    mode = next(mode for mode in MODES + MORE_MODES if mode.name == name)
    training = Training(rank, mode)
    norms, left = [], []
    for step in range(STEPS):
        if run_dir is not None and any(step == watched.start for watched in WATCHED):
            training.watch(run_dir)
        if run_dir is not None and any(step in watched for watched in WATCHED):
            norms.append(training.oracle(step).norm)
        training.step(step)
        if any(step == watched.stop - 1 for watched in WATCHED):
            training.close()
            left.append(what_is_left(training))
    return {"state": training.state(), "norms": norms, "left": left}


def what_is_left(training: Training) -> list[str]:
    """Name everything of the monitor that is still in the training."""
    hooks = {
        "before forward": training.ddp._forward_pre_hooks,
        "after forward": training.ddp._forward_hooks,
        "optimizer": training.optimizer._optimizer_step_post_hooks,
        **{
            name: parameter._post_accumulate_grad_hooks
            for name, parameter in training.model.named_parameters()
        },
        **{name: p._backward_hooks for name, p in training.model.named_parameters()},
    }
    left = [name for name, registered in hooks.items() if registered]
    left += [thread.name for thread in threading.enumerate() if "rankscope" in thread.name]
    if DistributedDataParallel._match_all_reduce_for_bwd_pass is not _SHADOW:
        left.append("shadow steps")
    return left


trained = alone_and_watched(train, NAMES, 2)


@pytest.mark.parametrize("name", NAMES)
def test_watching_for_a_while_changes_and_leaves_nothing(trained, name):
    for rank in trained[0]:
        alone, watched = rank[name]
        assert watched["left"] == [[], []]
        assert_same_bits(alone["state"], watched["state"])


@pytest.mark.parametrize("name", NAMES)
def test_each_part_is_a_run_of_its_own(trained, name):
    ranks, folder = trained
    exact_TW = np.array([rank[name][1]["norms"] for rank in ranks]).T
    for run_dir, steps in ((name, slice(0, 4)), (f"{name}-2", slice(4, 7))):
        run = Run.open(folder / run_dir)
        assert run.status == "complete"
        observed = run.columns(Table.STEPS, "observed")["observed"].astype(bool)
        learnt = name == "shared reentrant checkpoints"
        assert observed.tolist() == [not learnt, *[True] * (len(exact_TW[steps]) - 1)]
        _, norms_TW = run.per_worker("grad_norm")
        np.testing.assert_allclose(norms_TW[observed], exact_TW[steps][observed], rtol=1e-6)
