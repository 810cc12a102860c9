"""Gradients that no reduction has seen, on real ranks: noticed, and never where all is well."""

import tempfile
from pathlib import Path

import pytest
import torch

from rankscope import Run
from rankscope.core.signals import Table
from support.loops import Loop
from support.models import make_batch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 6


def plain(loop, step):
    loop.ddp(**make_batch(loop.rank, step))["loss"].backward()


def past_the_wrapper(loop, step):
    loop.ddp.module(**make_batch(loop.rank, step))["loss"].backward()


def both_ways(loop, step):
    """A second view of the batch that goes past the wrapper; one backward pass reduces both."""
    batch = make_batch(loop.rank, step)
    (loop.ddp(**batch)["loss"] + loop.ddp.module(**batch)["loss"]).backward()


def accumulate(loop, step, synchronise_at=2):
    for micro in range(3):
        loop.ddp.require_backward_grad_sync = micro == synchronise_at
        plain(loop, 3 * step + micro)


def one_too_early(loop, step):
    accumulate(loop, step, synchronise_at=0)


def evaluate_inside(loop, step):
    with torch.no_grad():
        loop.ddp.module(**make_batch(loop.rank, step))
    plain(loop, step)


LOOPS = {
    "plain": (plain, False),
    "both ways": (both_ways, False),
    "accumulate": (accumulate, False),
    "evaluate inside": (evaluate_inside, False),
    "past the wrapper": (past_the_wrapper, True),
    "one too early": (one_too_early, True),
}


def train(rank, backward, run_dir):
    loop = Loop(rank, run_dir)
    for step in range(STEPS):
        backward(loop, step)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.close()
    return {"bits": loop.bits(), "warnings": loop.warnings}


def train_all(rank, folder):
    return {
        name: (train(rank, backward, None), train(rank, backward, f"{folder}/{name}"))
        for name, (backward, _) in LOOPS.items()
    }


@pytest.fixture(scope="module")
def trained():
    with tempfile.TemporaryDirectory() as folder:
        yield run_ranks(train_all, 3, folder), Path(folder)


@pytest.mark.parametrize("name", LOOPS)
def test_the_training_keeps_its_bits(trained, name):
    for by_name in trained[0]:
        alone, watched = by_name[name]
        assert alone["bits"] == watched["bits"]
        assert watched["warnings"] == []


@pytest.mark.parametrize("name", LOOPS)
def test_every_step_is_recorded_with_its_loss(trained, name):
    run = Run.open(trained[1] / name)
    assert run.table(Table.STEPS).num_rows == STEPS
    _, losses_TW = run.per_worker("loss")
    assert (losses_TW > 0).all()


@pytest.mark.parametrize("name", LOOPS)
def test_what_nothing_reduced_is_named(trained, name):
    found = {finding.cause: finding for finding in Run.open(trained[1] / name).findings()}
    if not LOOPS[name][1]:
        found.pop("state.buffers_differ")  # the model normalises batches without synchronising
        assert not [f.explanation for c, f in found.items() if c.startswith(("sync.", "state."))]
        return
    finding = found["sync.not_reduced"]
    assert (str(finding.severity), finding.ranks) == ("error", (0, 1, 2))
    assert finding.first_step <= 1
