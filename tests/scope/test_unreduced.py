"""Gradients that no reduction has seen, or that it adds up: noticed, never where all is well."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from support.findings import faults
from support.loops import PLAN, Loop, train_watched, wait_for
from support.models import make_batch, make_model
from support.ranks import alone_and_watched, on_ranks

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


def never_synchronised(loop, step):
    with loop.ddp.no_sync():
        plain(loop, step)


def reduced_by_hand(loop, step):
    never_synchronised(loop, step)
    for parameter in loop.ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


LOOPS = {
    "both ways": (both_ways, False),
    "accumulate": (accumulate, False),
    "reduced by hand": (reduced_by_hand, False),
    "past the wrapper": (past_the_wrapper, True),
    "one too early": (one_too_early, True),
    "never synchronised": (never_synchronised, True),
}
MERGED = ("reduced by hand", "never synchronised")
"""There the first two steps count as one: the second shows that the first was no part of it."""


def train(rank, name, run_dir):
    loop = Loop(rank, run_dir)
    for step in range(STEPS):
        LOOPS[name][0](loop, step)
        loop.update()
    loop.close()
    return {"bits": loop.bits(), "warnings": loop.warnings}


trained = alone_and_watched(train, LOOPS, 3)


@pytest.mark.parametrize("name", LOOPS)
def test_every_step_is_recorded_with_its_loss_and_the_training_keeps_its_bits(trained, name):
    for by_name in trained[0]:
        alone, watched = by_name[name]
        assert alone["bits"] == watched["bits"]
        assert watched["warnings"] == []
    run = Run.open(trained[1] / name)
    assert run.table(Table.STEPS).num_rows == STEPS - (name in MERGED)
    _, losses_TW = run.per_worker("loss")
    assert (losses_TW > 0).all()
    _, unreduced_TW = run.per_worker("unreduced")
    assert (unreduced_TW == (LOOPS[name][1] or name in MERGED)).all()


@pytest.mark.parametrize("name", LOOPS)
def test_what_nothing_reduced_is_named(trained, name):
    found = {finding.cause: finding for finding in Run.open(trained[1] / name).findings()}
    if not LOOPS[name][1]:
        found.pop("state.buffers_differ")  # the model normalises batches without synchronising
        at_rest = found.pop("state.not_updated", None)
        if at_rest is not None:  # the rounding of its gradient, 0 before the normalisation, decides
            assert (at_rest.severity, at_rest.evidence["names"]) == (Severity.NOTE, ["hidden.bias"])
        assert not [f.explanation for c, f in found.items() if c.startswith(("sync.", "state."))]
        return
    finding = found["sync.not_reduced"]
    assert (str(finding.severity), finding.ranks) == ("error", (0, 1, 2))
    assert finding.first_step <= 1


LOCAL = 4
LAG = 3
"""Steps until one can be judged: without reduction, it ends when the next one has begun."""


def average(loop, *, take=True):
    """Average the parameters, in place or for the others alone."""
    for parameter in loop.ddp.parameters():
        mean = parameter.detach().clone()
        dist.all_reduce(mean)
        if take:
            parameter.data.copy_(mean / dist.get_world_size())


def local_sgd(rank, run_dir, *, every=LOCAL, at=LOCAL - 1, steps=50, missed=None, **options):
    loop = Loop(rank, run_dir, **options)
    for step in range(steps):
        wait_for(loop.scope, step - LAG)
        never_synchronised(loop, step)
        loop.update()
        if step % every == at:
            average(loop, take=not (rank == 1 and step == missed))
    loop.close()


def by_torch(rank, run_dir):
    """Train with torch's own hook and averages for local SGD; groups of one rank each."""
    loop = Loop(rank, run_dir)
    groups = [dist.new_group([each]) for each in range(2)]
    state = PostLocalSGDState(None, groups[rank], start_localSGD_iter=8)
    loop.ddp.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=5, warmup_steps=8)
    for step in range(UNPLANNED_STEPS):
        wait_for(loop.scope, step - LAG)
        plain(loop, step)
        loop.optimizer.step()
        averager.average_parameters(loop.ddp.parameters())
        loop.optimizer.zero_grad()
    loop.close()


PLANNED = {"plan": {**PLAN, "local_steps": LOCAL}}
LOCAL_JOBS = {
    "healthy": PLANNED,
    "averages first": {"at": 0, **PLANNED},  # as torch's PeriodicModelAverager does
    "missed": {"missed": 43, "overhead_budget": 0.5, **PLANNED},
}
UNPLANNED_STEPS = 60


def train_locally(rank, folder):
    for name, job in LOCAL_JOBS.items():
        local_sgd(rank, f"{folder}/{name}", **job)
    local_sgd(rank, f"{folder}/by hand", every=11, at=10, steps=UNPLANNED_STEPS)
    by_torch(rank, f"{folder}/by torch")
    unfreeze(rank, folder)


trained_locally = on_ranks(train_locally, 2)


@pytest.mark.parametrize("name", LOCAL_JOBS)
def test_parameters_have_to_agree_after_each_average_alone(trained_locally, name):
    run = Run.open(trained_locally[1] / name)
    assert run.table(Table.STEPS).num_rows == 50
    told = faults(run)
    assert list(told) == (["averages-differ"] if name == "missed" else [])
    if told:
        finding = told["averages-differ"]
        assert (finding.cause, finding.ranks) == ("state.parameters_differ", (0, 1))
        assert (finding.first_step, finding.last_step) == (43, 43)
        assert "though the plan has an average every 4 steps" in finding.explanation


@pytest.mark.parametrize("name", ["by hand", "by torch"])
def test_averages_without_a_plan_are_recognised(trained_locally, name):
    run = Run.open(trained_locally[1] / name)
    found = {f.id: f for f in run.findings()}
    assert faults(run) == {}
    assert "equal again now and then" in found["sync.not_reduced"].explanation
    assert "local_steps" in found["sync.not_reduced"].next_check


def unfreeze(rank, folder):
    """Freeze a layer before DDP wraps it, or after, and train it from some step on."""
    for name in ("frozen when wrapped", "frozen when watched"):
        model = make_model(dropout=0.0)
        model.hidden.requires_grad_(name != "frozen when wrapped")
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        model.hidden.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(step, model=model, ddp=ddp):
            model.hidden.requires_grad_(step > 1)
            return ddp(**make_batch(rank, step))["loss"]

        train_watched(ddp, optimizer, f"{folder}/{name}", STEPS, loss_of)


def test_a_layer_that_is_trained_later_is_blamed_only_if_nothing_reduces_it(trained_locally):
    found, healthy = (
        {finding.cause: finding for finding in Run.open(trained_locally[1] / name).findings()}
        for name in ("frozen when wrapped", "frozen when watched")
    )
    assert found["sync.not_reduced"].first_step == 2
    assert found["sync.not_reduced"].evidence["names"] == ["hidden.weight", "hidden.bias"]
    assert "sync.gradients_differ" not in found
    assert not [cause for cause in healthy if cause.startswith(("sync.", "state.param"))]


# Sums -------------------------------------------------------------------------------------------

SUMMED_STEPS, WIDTH = 20, 16


def train_on_sums(rank, run_dir, by_loop, max_norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
    if not by_loop:
        fully_shard(model)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(step):
        torch.manual_seed(2 * step + rank)
        batch = torch.randn(8, WIDTH)
        return (model(batch) - batch.flip(1)).square().mean() / dist.get_world_size()

    def reduce_and_clip(step):
        for parameter in model.parameters() if by_loop else ():
            dist.all_reduce(parameter.grad)
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    train_watched(model, optimizer, run_dir, SUMMED_STEPS, loss_of, reduce_and_clip)


SUMS = {
    "loop": (True, None, 2.0),
    "loop that clips": (True, 0.01, None),
    "FSDP2 that clips": (False, 0.01, 2.0),
}
"""Whether the loop reduces, the largest norm, and how many workers are known to be added up."""


def train_on_all_sums(rank, folder):
    for name, (by_loop, max_norm, _) in SUMS.items():
        train_on_sums(rank, f"{folder}/{name}", by_loop, max_norm)


summed = on_ranks(train_on_all_sums, 2)


@pytest.mark.parametrize("name", SUMS)
def test_losses_that_are_divided_by_the_workers_are_right(summed, name):
    run = Run.open(summed[1] / name)
    assert faults(run) == {}
    assert set(run.table(Table.WORKERS)["summed_workers"].to_pylist()) == {SUMS[name][2]}
