"""Training loops off the beaten track: measured right or not at all, and never changed.

Some train on in evaluation mode, some have passes that raise or that nothing comes of.
"""

import contextlib
import copy
from functools import partial

import numpy as np
import pytest
import torch

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import Loop
from support.models import make_batch
from support.ranks import on_ranks
from support.releases import SINCE_TORCH_2_13

pytestmark = pytest.mark.ranks

STEPS, LEFT_AT = 4, 2
UNMEASURED, CARRIED_OVER = "unmeasured", "carried over"
"""What loops yield of each step: one of these, or the gradient's norm, or that and the loss."""


def run_passes(loop, numbers, *, used=(), synchronise=False):
    """Run micro-batches; return their gradient's norm and loss. The last one, or all, reduce."""
    norm = loop.exact_norm(*numbers, branch=used)
    losses = []
    for index, number in enumerate(numbers):
        batch = make_batch(loop.rank, number)
        last = synchronise or number == numbers[-1]
        with contextlib.nullcontext() if last else loop.ddp.no_sync():
            loss = loop.ddp(**batch, use_branch=bool(used) and used[index])["loss"]
            (loss / len(numbers)).backward()
        losses.append(loss.item())
    return norm, float(np.mean(losses))


def never_zeroed(loop):
    for step in range(STEPS):
        norm, _ = run_passes(loop, [step])
        loop.optimizer.step()
        yield CARRIED_OVER if step else norm


def micro_batches_that_all_synchronise(loop):
    """Each pass adds to what the one before has left; the optimizer's call ends the step."""
    for step, count in enumerate((3, 3, 1, 2)):
        norm, _ = run_passes(loop, range(3 * step, 3 * step + count), synchronise=True)
        loop.update()
        moved = step == 0 and loop.ddp.gradient_as_bucket_view  # DDP has made its buckets anew
        yield UNMEASURED if moved else norm


def thrown_away_before_its_own(loop):
    """As where a generator's loss reaches the discriminator, after whose update nothing zeroes."""
    for step in range(STEPS):
        loop.forward(2 * step).backward()
        norm = loop.exact_norm(2 * step + 1)
        loss = loop.forward(2 * step + 1)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        yield norm


def backward_twice(loop):
    """The second pass adds the local gradient to the reduced one: a bug, but not the monitor's."""
    for step in range(STEPS):
        norm = loop.exact_norm(step)
        loss = loop.forward(step)
        if step == 1:
            loss.backward(retain_graph=True)
        loss.backward()
        loop.update()
        yield UNMEASURED if step == 1 else norm


def one_backward_for_two_forwards(loop):
    for step in range(STEPS):
        norm = loop.exact_norm(2 * step, 2 * step + 1)
        (loop.forward(2 * step) + loop.forward(2 * step + 1)).backward()
        loop.update()
        yield norm


def branch_in_some_micro_batches(loop):
    """A parameter that only an early micro-batch uses is not read in the last one."""
    for step in range(STEPS):
        used = [(True, True), (True, False), (False, True), (True, True)][step]
        if loop.rank == 1:
            used = (True, True)
        norm, _ = run_passes(loop, range(2 * step, 2 * step + 2), used=used)
        loop.update()
        yield UNMEASURED if used == (True, False) else norm


def odd_steps_after_many_alike(loop):
    """By then most parameters have no hook any more."""

    def one(*numbers, used=True):
        norm, _ = run_passes(loop, numbers, used=(used,) * len(numbers))
        loop.optimizer.step()
        if numbers != (11,):
            loop.optimizer.zero_grad()
        return norm

    for step in range(10):
        yield one(step)
    hooked = sum(bool(p._post_accumulate_grad_hooks) for p in loop.ddp.parameters())
    views = loop.ddp.gradient_as_bucket_view
    assert loop.scope is None or hooked == (len(list(loop.ddp.parameters())) if views else 2)
    yield one(10, used=loop.rank == 1)
    yield one(11)
    one(12)
    yield CARRIED_OVER
    yield one(13, 14)
    loop.ddp.eval()
    yield one(15)
    loop.ddp.train()
    for step in range(16, 20):
        yield one(step)


def forgotten_evaluation(loop, *, accumulate=1):
    for step in range(STEPS):
        if step == LEFT_AT and loop.rank == 0:
            loop.ddp.eval()
        yield run_passes(loop, range(accumulate * step, accumulate * (step + 1)))
        loop.update()


def never_in_training_mode(loop):
    """The training gives its losses."""
    loop.ddp.eval()
    for step in range(STEPS):
        norm = loop.exact_norm(step)
        loss = loop.forward(step)
        if loop.scope is not None:
            loop.scope.loss(loss)
        loss.backward()
        loop.update()
        yield norm, loss.item()


def attacked(loop):
    """Another gradient is asked for in evaluation mode, also between forward and backward."""
    for step in range(STEPS):
        norm = loop.exact_norm(step)
        ask_for_another_gradient(loop)
        loss = loop.forward(step)
        ask_for_another_gradient(loop)
        loss.backward()
        loop.update()
        yield norm, loss.item()


def ask_for_another_gradient(loop):
    loop.ddp.eval()
    torch.autograd.grad(loop.forward(99), loop.model.head.bias)
    loop.ddp.train()


class InterruptedPassError(Exception):
    pass


def stop(*_):
    raise InterruptedPassError


def press_key(*_):
    raise KeyboardInterrupt


LOST, KEPT = (0, 2, 3, 6), (1, 4, 5, 7)
"""Batches of which nothing comes, and those that make a step."""

PLACES = ("in forward", "at different places", "in an early micro-batch", "dropped")
"""Where a pass ends. In the last case the training names its samples and gives its loss itself."""


def interrupted(loop, *, place):
    scope = loop.scope if place == "dropped" else None
    for number in range(len(LOST) + len(KEPT)):
        if scope is not None:
            scope.batch([100 * number + loop.rank, f"{number} {loop.rank}"])
        if number in LOST:
            early = place == "in an early micro-batch"
            with loop.ddp.no_sync() if early else contextlib.nullcontext():
                run_into(loop, number, place, scope)
            if not early:
                loop.ddp.reducer._reset_state()  # else DDP itself may refuse to go on
            loop.optimizer.zero_grad()
            continue
        norm = loop.exact_norm(number)
        loss = loop.forward(number)
        if scope is not None:
            scope.loss(loss)
        loss.backward()
        loop.update()
        yield norm, loss.item()


def run_into(loop, number, place, scope):
    if place == "at different places":
        place = ("at the output", "in the model", "in the loss")[(number + loop.rank) % 3]
    if place == "in forward":
        handle = loop.model.hidden.register_forward_hook(stop)
    else:
        handle = loop.model.embedding.weight.register_hook(stop)
    with contextlib.suppress(InterruptedPassError, KeyboardInterrupt):
        loss = loop.forward(number)
        if scope is not None:
            scope.loss(loss)
        if place == "at the output":
            loss.register_hook(press_key)
        if place == "in the loss":
            loss = 3 * loss
            loss.register_hook(press_key)
        if place != "dropped":
            loss.backward()
    handle.remove()


LOOPS = [
    never_zeroed,
    micro_batches_that_all_synchronise,
    thrown_away_before_its_own,
    backward_twice,
    *([one_backward_for_two_forwards] if SINCE_TORCH_2_13 else []),
    branch_in_some_micro_batches,
    odd_steps_after_many_alike,
]
WITH_BRANCH = (branch_in_some_micro_batches, odd_steps_after_many_alike)
IN_VIEWS = (never_zeroed, micro_batches_that_all_synchronise, *WITH_BRANCH)
"""Tried with gradients that are views of DDP's buckets as well."""

EVALUATING = {
    "forgotten evaluation": (forgotten_evaluation, {0: LEFT_AT}),
    "forgotten while accumulating": (partial(forgotten_evaluation, accumulate=2), {0: LEFT_AT}),
    "never in training mode": (never_in_training_mode, {0: 0, 1: 0}),
    **({"attacked": (attacked, {})} if SINCE_TORCH_2_13 else {}),
}
"""With the step since which a rank trains in evaluation mode."""
WITH_LOSSES = {
    **{name: loop for name, (loop, _) in EVALUATING.items()},
    **{place: partial(interrupted, place=place) for place in PLACES},
}
CASES = {
    **{loop.__name__: loop for loop in LOOPS},
    **{f"{loop.__name__} in bucket views": loop for loop in IN_VIEWS},
    **WITH_LOSSES,
}


def train_all(rank, folder):
    results = {}
    for name, loop in CASES.items():
        options = {"ddp": {"gradient_as_bucket_view": "bucket views" in name}}
        if loop is odd_steps_after_many_alike:  # statistics of an evaluation are its own
            options["ddp"]["broadcast_buffers"] = False
        if loop in WITH_BRANCH:
            options["ddp"]["find_unused_parameters"] = options["branch"] = True
        alone = Loop(rank, None, **copy.deepcopy(options))
        list(loop(alone))
        watched = Loop(rank, f"{folder}/{name}", **options)
        expected = [e if isinstance(e, tuple) else (e, None) for e in loop(watched)]
        watched.close()
        results[name] = {"expected": expected, "same": alone.bits() == watched.bits()}
        results[name]["warnings"] = [each.partition(":")[0] for each in watched.warnings]
    return results


trained = on_ranks(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_measured_right_or_not_at_all(trained, name):
    results, folder = trained
    run = Run.open(folder / name)
    assert run.status == "complete"
    assert all(rank[name]["same"] for rank in results)
    by_step = zip(*[rank[name]["expected"] for rank in results], strict=True)
    expected = [[norm for norm, _ in step] for step in by_step]
    observed = run.columns(Table.STEPS, "observed")["observed"].astype(bool)
    assert observed.tolist() == [not any(isinstance(e, str) for e in step) for step in expected]
    assert observed.any()
    _, flags = run.per_worker("grad_carried_over")
    assert flags.astype(bool).tolist() == [[e == CARRIED_OVER for e in step] for step in expected]
    _, left = run.per_worker("grad_left_over")
    assert CASES[name] is not thrown_away_before_its_own or not left.any()
    _, norms = run.per_worker("grad_norm")
    fine = [step for step, seen in enumerate(observed) if seen]
    estimated = CASES[name] is micro_batches_that_all_synchronise
    np.testing.assert_allclose(
        norms[fine], [expected[step] for step in fine], rtol=0.15 if estimated else 1e-6
    )
    assert np.isfinite(run.columns(Table.STEPS, "loss_mean")["loss_mean"]).all()


@pytest.mark.parametrize("name", CASES)
def test_only_who_trains_in_evaluation_mode_is_warned_and_once(trained, name):
    _, since = EVALUATING.get(name, (None, {}))
    for rank, by_name in enumerate(trained[0]):
        told = [f"rank {rank} trains in evaluation mode since step {since.get(rank)}"]
        assert by_name[name]["warnings"] == (told if rank in since else [])


@pytest.mark.parametrize("name", WITH_LOSSES)
def test_losses_and_samples_are_those_of_the_optimizer_s_steps_and_of_no_other_pass(trained, name):
    results, folder = trained
    run = Run.open(folder / name)
    losses_WT = [[loss for _, loss in rank[name]["expected"]] for rank in results]
    np.testing.assert_allclose(run.per_worker("loss")[1], np.transpose(losses_WT), rtol=1e-6)
    np.testing.assert_allclose(run.per_worker("grad_scale")[1], 1.0)
    count, rows = 2 if name == "forgotten while accumulating" else 1, 2 if name == "dropped" else 3
    assert run.table(Table.MICRO).num_rows == (2 * STEPS * count if count > 1 else 0)
    samples = run.columns(Table.SAMPLES, "step", "rank", "samples")
    assert [len(row) for row in samples["samples"]] == [count * rows] * 2 * STEPS
    for step, rank, row in zip(*samples.values(), strict=True):
        assert name != "dropped" or row[0] == 100 * KEPT[step] + rank
    causes = {finding.cause for finding in run.findings()}
    assert not {cause for cause in causes if cause.startswith(("sync.", "state.param", "env."))}
