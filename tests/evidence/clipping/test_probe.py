"""What the probe records of torch's clipping functions, alone and on real ranks."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

import rankscope
from rankscope import Run
from rankscope.bus.probe import StepEnd
from rankscope.evidence.clipping.probe import ClippingProbe
from support.ranks import run_ranks

LIMIT = 0.1
STEPS = 8


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    model(torch.randn(4, 6)).square().sum().backward()
    return model


@pytest.fixture
def probe(model):
    probe = ClippingProbe(model.parameters(), lambda work, *args: work(*args), whole=True)
    yield probe
    probe.close()


def recorded(probe):
    pending = probe.collect(StepEnd(0, comparable=True, idle=frozenset(), num_passes=1))
    assert pending.ready
    return pending.read().values


def test_one_call_for_all_parameters(model, probe):
    twin = copy.deepcopy(model)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = mine.grad.clone()
    norm = clip_grad_norm_(model.parameters(), LIMIT)
    values = recorded(probe)
    assert values["clip_limit"] == LIMIT
    assert values["clip_order"] == 2
    assert values["clip_left_out"] == 0
    assert values["clip_factor"] == pytest.approx(LIMIT / float(norm), rel=1e-5)
    assert values["clip_whole"]
    probe.close()
    clip_grad_norm_(twin.parameters(), LIMIT)  # the same bits without a listener
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(mine.grad, other.grad) for mine, other in pairs)
    assert "clip_limit" not in recorded(probe)


def clip_shards(rank, folder):
    """Train under FSDP2, clipped rightly and then by the mean of the ranks' norms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    after = []
    with rankscope.watch(model, optimizer, run_dir=folder, overhead_budget=None) as scope:
        for step in range(2 * STEPS):
            loss = model(torch.randn(16, 8, generator=generator)).square().mean()
            scope.loss(loss)
            optimizer.zero_grad()
            loss.backward()
            if step < STEPS:
                clip_grad_norm_(model.parameters(), LIMIT)
            else:
                own = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
                dist.all_reduce(own)
                clip_grads_with_norm_(model.parameters(), LIMIT, own / dist.get_world_size())
            whole = [p.grad.full_tensor().double() for p in model.parameters()]
            after.append(math.sqrt(sum(float(g.square().sum()) for g in whole)))
            optimizer.step()
    return after


@pytest.mark.ranks
def test_the_norm_after_clipping_follows_from_the_record(tmp_path):
    after = run_ranks(clip_shards, 2, tmp_path / "run")[0]
    run = Run.open(tmp_path / "run")
    steps, scales = run.per_worker("applied_scale")
    norms = np.asarray(run.steps("grad_norm_reduced")["grad_norm_reduced"])[steps]
    np.testing.assert_allclose(scales[:, 0] * norms, np.array(after)[steps], rtol=1e-6)
    [found] = [f for f in run.findings() if f.cause == "sync.clip_norm"]
    assert (found.first_step, str(found.severity)) == (STEPS, "warning")


def test_clipping_between_two_reductions_of_a_step_is_counted(model, probe):
    for clips in (True, True, False, True):
        probe.see_reduced()
        if clips:
            clip_grad_norm_(model.parameters(), LIMIT)
    assert recorded(probe)["clips_between"] == 2
    clip_grad_norm_(model.parameters(), LIMIT)
    probe.before_update()
    clip_grad_norm_(model.parameters(), LIMIT)
    assert recorded(probe)["clips_between"] == 0


def test_clipping_of_tensors_without_a_gradient_is_counted(model, probe):
    gradients = [p.grad for p in model.parameters()]
    clip_grads_with_norm_(gradients, LIMIT, torch.tensor(2 * LIMIT))
    assert recorded(probe)["clips_of_nothing"] == 1
    clip_grads_with_norm_(gradients, LIMIT, torch.tensor(LIMIT / 2))  # there is nothing to clip
    assert recorded(probe)["clips_of_nothing"] == 0
    clip_grads_with_norm_(gradients, LIMIT, torch.tensor(2 * LIMIT))
    clip_grads_with_norm_(list(model.parameters()), LIMIT, torch.tensor(2 * LIMIT))
    assert recorded(probe)["clips_of_nothing"] == 0  # frozen parameters beside these
    clip_grad_norm_([nn.Parameter(torch.ones(2))], LIMIT)
    assert recorded(probe)["clips_of_nothing"] == 0
