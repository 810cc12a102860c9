"""Passes in evaluation mode: a training that goes on in it is measured, anything else is not.

Neither are passes that only ask for other gradients, in any mode.
"""

import contextlib

import numpy as np
import pytest
import torch

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import Loop
from support.models import make_batch
from support.ranks import alone_and_watched
from support.releases import SINCE_TORCH_2_13

pytestmark = pytest.mark.ranks

STEPS, LEFT_AT = 5, 2


def forgotten_with_given_losses(loop, step):
    if step == LEFT_AT and loop.rank == 0:
        loop.ddp.eval()
    norm = loop.exact_norm(step)
    loss = loop.forward(step)
    if loop.scope is not None:
        loop.scope.loss(loss)
    loss.backward()
    return norm, {step: loss.item()}


def forgotten_while_accumulating(loop, step):
    if step == LEFT_AT and loop.rank == 0:
        loop.ddp.eval()
    norm = loop.exact_norm(2 * step, 2 * step + 1)
    with loop.ddp.no_sync():
        first = loop.forward(2 * step)
        (first / 2).backward()
    second = loop.forward(2 * step + 1)
    (second / 2).backward()
    return norm, {2 * step: first.item(), 2 * step + 1: second.item()}


def never_in_training_mode(loop, step):
    loop.ddp.eval()
    return plain(loop, step)


def attacked(loop, step):
    """Another gradient is asked for in evaluation mode, also between forward and backward."""
    norm = loop.exact_norm(step)
    ask_for_another_gradient(loop)
    loss = loop.forward(step)
    ask_for_another_gradient(loop)
    loss.backward()
    return norm, {step: loss.item()}


def ask_for_another_gradient(loop):
    with evaluation(loop):
        torch.autograd.grad(loop.forward(99), loop.model.head.bias)


def plain(loop, step):
    norm = loop.exact_norm(step)
    loss = loop.forward(step)
    loss.backward()
    return norm, {step: loss.item()}


@contextlib.contextmanager
def evaluation(loop):
    loop.ddp.eval()
    yield
    loop.ddp.train()


LOOPS = {
    forgotten_with_given_losses: {0: LEFT_AT},
    forgotten_while_accumulating: {0: LEFT_AT},
    never_in_training_mode: {0: 0, 1: 0},
    **({attacked: {}} if SINCE_TORCH_2_13 else {}),
}
"""With the step since which a rank trains in evaluation mode."""
NAMED = {loop.__name__: loop for loop in LOOPS}


def train(rank, name, run_dir):
    loop = Loop(rank, run_dir)
    truth = []
    for step in range(STEPS):
        truth.append(NAMED[name](loop, step))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.close()
    return {"truth": truth, "bits": loop.bits(), "warnings": loop.warnings}


trained = alone_and_watched(train, NAMED, 2)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_training_keeps_its_bits_and_hears_of_its_mode_once(trained, loop):
    for rank, by_name in enumerate(trained[0]):
        alone, watched = by_name[loop.__name__]
        assert alone["bits"] == watched["bits"]
        since = LOOPS[loop].get(rank)
        told = (
            [] if since is None else [f"rank {rank} trains in evaluation mode since step {since}"]
        )
        assert [warning.partition(":")[0] for warning in watched["warnings"]] == told


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_each_step_of_the_optimizer_is_measured_and_no_other_pass(trained, loop):
    run = Run.open(trained[1] / loop.__name__)
    truth = [by_name[loop.__name__][1]["truth"] for by_name in trained[0]]
    assert run.columns(Table.STEPS, "observed")["observed"].astype(bool).tolist() == [True] * STEPS
    norms_TW = np.transpose([[norm for norm, _ in rank] for rank in truth])
    losses_TW = np.transpose(  # batches count alike, as in the gradient
        [[np.mean(list(losses.values())) for _, losses in steps] for steps in truth]
    )
    np.testing.assert_allclose(run.per_worker("grad_norm")[1], norms_TW, rtol=1e-5)
    np.testing.assert_allclose(run.per_worker("loss")[1], losses_TW, rtol=1e-6)
    np.testing.assert_allclose(run.per_worker("grad_scale")[1], 1.0)
    num_micro = len(truth[0][0][1])
    drawn = run.columns(Table.STEPS, "samples_drawn")["samples_drawn"]
    assert (drawn == 2 * num_micro * len(make_batch(0, 0)["input_ids"])).all()


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_nothing_is_said_to_differ(trained, loop):
    causes = {finding.cause for finding in Run.open(trained[1] / loop.__name__).findings()}
    differ = {cause for cause in causes if cause.startswith(("sync.", "state.param", "env."))}
    assert not differ
