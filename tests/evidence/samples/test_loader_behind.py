"""Restarted jobs: a loader that went back alone, or with its model, and a job that began anew."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from support.loops import train_watched
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, BACK = 20, 2


def train(rank, run_dir, model, begin, steps=STEPS):
    """Train from a step on; return the model ``BACK`` steps before the end, and at the end."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = []  # each step

    def loss_of(step):
        before.append(copy.deepcopy(model))
        draw = torch.Generator().manual_seed(2 * (begin + step) + rank)
        return wrapped(torch.randn(4, 6, generator=draw)).square().mean()

    train_watched(wrapped, optimizer, run_dir, steps, loss_of)
    return before[-BACK], model


def train_all(rank, folder):
    for name in ("behind", "whole"):
        torch.manual_seed(0)
        older, last = train(rank, f"{folder}/{name}", nn.Linear(6, 6), 0)
        restored = copy.deepcopy(last if name == "behind" else older)
        train(rank, f"{folder}/{name}", restored, STEPS - BACK)
    for steps in (BACK, STEPS):
        torch.manual_seed(0)
        train(rank, f"{folder}/anew", nn.Linear(6, 6), 0, steps)


def test_a_loader_that_is_behind_the_model_is_a_warning(tmp_path):
    run_ranks(train_all, 2, str(tmp_path))
    found = {}
    for name in ("behind", "whole", "anew"):
        run = Run.open(tmp_path / f"{name}-2")
        [found[name]] = [one for one in run.findings() if one.cause == "data.resume_mismatch"]
    assert (found["whole"].id, found["whole"].severity) == ("steps-done-twice", Severity.NOTE)
    assert (found["anew"].id, found["anew"].severity) == ("begun-anew", Severity.NOTE)
    assert f"restarted at step {BACK} with the parameters of the run's first" in (
        found["anew"].explanation
    )
    behind = found["behind"]
    assert (behind.id, behind.severity) == ("loader-behind-model", Severity.WARNING)
    assert f"those after step {STEPS - 1}, bit for bit" in behind.explanation
