import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

import rankscope
from rankscope import Run
from rankscope.bus.finding import Severity
from rankscope.bus.probe import StepEnd
from rankscope.bus.step import StepReport
from rankscope.evidence.clipping import judge
from rankscope.evidence.clipping.probe import ClippingProbe
from support.ranks import run_ranks
from support.stepping import evidence_of, words
from support.streams import gathered

W = 4
LIMIT = 1.0


def parts():
    """Yield the norms of the ranks' shards ``[W]``: of unequal size, and new in each step."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        size = np.exp(0.4 * rng.standard_normal())
        yield size * np.array([np.linalg.norm(rng.standard_normal(n)) for n in (30, 20, 8, 2)])


def whole(parts_W):
    return np.sqrt((parts_W**2).sum())


def watch(factors_of, *, detectors=None, spread=0.0, planned=None, **columns):
    """Return the last evidence by key of a run whose ranks scale by ``factors_of(parts_W)``."""
    rng, reports = np.random.default_rng(1), []
    detectors = detectors or (judge.FactorLaw(), judge.NormLaw(planned))
    for step, parts_W in enumerate(parts()):
        factors_W = factors_of(parts_W) * (1 + 1e-8 * rng.standard_normal(W))
        given = {n: value(parts_W) if callable(value) else value for n, value in columns.items()}
        workers = {
            "applied_scale": factors_W,
            "applied_spread": np.full(W, spread),
            "clip_rounding": np.full(W, 1e-5),
            "reduced_norm": parts_W,
            **{name: np.broadcast_to(value, W) for name, value in given.items()},
        }
        one = replace(gathered(step, [[]] * W, **workers), observed=True)
        reports.append(StepReport(one, {"grad_norm_reduced": whole(parts_W)}))
    told = [each for detector in detectors for each in evidence_of(detector, *reports)]
    return {each.key or each.cause: each for each in told}


def by(norm):
    return lambda parts_W: np.broadcast_to(np.minimum(LIMIT / norm(parts_W), 1.0), W)


def called(norm=whole, order=2.0):
    factor = {"clip_factor": lambda p: by(norm)(p)[0], "clip_whole": True}
    return {"clip_limit": LIMIT, "clip_order": order, **factor}


def mean(parts_W):
    return parts_W.mean()


@pytest.mark.parametrize("columns", [{}, called(), {"planned": LIMIT}])
def test_clipping_by_the_norm_of_all_shards_is_right(columns):
    assert watch(by(whole), **columns) == {}


def test_factors_by_the_norm_of_each_ranks_own_shards():
    found = watch(by(lambda parts_W: parts_W))
    assert found.keys() == {"sync.shard_factors"}
    evidence = found["sync.shard_factors"]
    assert (evidence.severity, evidence.ranks) == (Severity.ERROR, (0, 1, 2, 3))
    assert evidence.first_step <= 3
    assert "fits the norm of its own shards" in words(evidence)
    assert f"in {evidence.count} of the 40 steps compared." in words(evidence)


def test_factors_that_are_nearly_equal_have_the_digits_that_tell_them_apart():
    nearly_W = 0.4 * (1 + 1e-3 * np.array([0, 0, 1, 1]))
    found = watch(lambda parts_W: nearly_W)["sync.shard_factors"]
    assert "0.4 on ranks 0 and 1, 0.4004 on ranks 2 and 3" in words(found)


@pytest.mark.parametrize("columns", [called(mean), {"planned": LIMIT}])
def test_the_mean_of_the_ranks_norms(columns):
    found = watch(by(mean), **columns)
    assert found.keys() == {"sync.clip_norm"}
    text = words(found["sync.clip_norm"])
    assert "the training clips by the mean of the ranks' norms" in text
    assert ("by the plan" in text) == ("planned" in columns)


def test_other_norms_and_other_clipping_are_silent():
    def largest(parts_W):
        return 0.1 * parts_W.max()

    assert watch(by(largest), **called(largest, order=np.inf)) == {}
    assert watch(by(lambda parts_W: parts_W), spread=0.01) == {}  # by value, by layer, noise
    assert watch(lambda parts_W: np.broadcast_to(1 / 130, W)) == {}  # a number of tokens


def test_a_limit_that_follows_the_norms_is_silent():
    norms = []

    def quantile(parts_W):
        norms.append(whole(parts_W))
        return np.broadcast_to(min(1.0, sorted(norms)[len(norms) // 10] / norms[-1]), W)

    assert watch(quantile) == {}
    limits = iter(np.linspace(1.0, 1.5, 40))

    def drifting(parts_W):
        return np.broadcast_to(min(1.0, next(limits) / whole(parts_W)), W)

    assert watch(drifting, detectors=[judge.NormLaw(None)]) == {}


def test_a_stage_of_a_pipeline_that_clips_by_its_own_norm():
    def stage(norm, **columns):
        return watch(by(norm), detectors=[judge.StageNorm(None)], **called(), **columns)

    [found] = stage(whole, schedule_scale=0.5).values()
    assert (found.key, found.severity, found.first_step) == (
        "clip-norm-of-stage", Severity.WARNING, 0
    )  # fmt: skip
    assert stage(lambda parts_W: np.hypot(whole(parts_W), 2.0), schedule_scale=0.5) == {}
    assert stage(whole) == {}  # no pipeline


def test_clipping_between_micro_batches_is_a_warning():
    def alone(_):
        return np.full(W, 0.5)

    steps = {"clips_between": [3] * W, "micro_batches": [4] * W}
    [found] = watch(alone, detectors=[judge.ClippedBetween()], **steps).values()
    assert (found.key, found.severity, found.count) == (judge.BETWEEN, Severity.WARNING, 40)
    assert "after each of 4 micro-batches" in words(found)
    assert watch(alone, detectors=[judge.ClippedBetween()], clips_between=[0] * W) == {}


def test_clipping_that_scales_nothing_is_a_warning():
    def unscaled(_):
        return np.ones(W)

    [found] = watch(unscaled, detectors=[judge.ClippedNothing()], clips_of_nothing=[1] * W).values()
    assert (found.key, found.severity, found.count) == ("clip-of-nothing", Severity.WARNING, 40)
    assert watch(unscaled, detectors=[judge.ClippedNothing()], clips_of_nothing=[0] * W) == {}
    halves = watch(
        lambda _: np.full(W, 0.5), detectors=[judge.ClippedNothing()], clips_of_nothing=1
    )
    assert halves == {}  # the training scales by code of its own


SMALL = 0.1
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
    norm = clip_grad_norm_(model.parameters(), SMALL)
    values = recorded(probe)
    assert values["clip_limit"] == SMALL
    assert values["clip_order"] == 2
    assert values["clip_left_out"] == 0
    assert values["clip_factor"] == pytest.approx(SMALL / float(norm), rel=1e-5)
    assert values["clip_whole"]
    probe.close()
    clip_grad_norm_(twin.parameters(), SMALL)  # the same bits without a listener
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
                clip_grad_norm_(model.parameters(), SMALL)
            else:
                own = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
                dist.all_reduce(own)
                clip_grads_with_norm_(model.parameters(), SMALL, own / dist.get_world_size())
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
            clip_grad_norm_(model.parameters(), SMALL)
    assert recorded(probe)["clips_between"] == 2
    clip_grad_norm_(model.parameters(), SMALL)
    probe.before_update(None)
    clip_grad_norm_(model.parameters(), SMALL)
    assert recorded(probe)["clips_between"] == 0


def test_clipping_of_tensors_without_a_gradient_is_counted(model, probe):
    gradients = [p.grad for p in model.parameters()]
    clip_grads_with_norm_(gradients, SMALL, torch.tensor(2 * SMALL))
    assert recorded(probe)["clips_of_nothing"] == 1
    clip_grads_with_norm_(gradients, SMALL, torch.tensor(SMALL / 2))  # there is nothing to clip
    assert recorded(probe)["clips_of_nothing"] == 0
    clip_grads_with_norm_(gradients, SMALL, torch.tensor(2 * SMALL))
    clip_grads_with_norm_(list(model.parameters()), SMALL, torch.tensor(2 * SMALL))
    assert recorded(probe)["clips_of_nothing"] == 0  # frozen parameters beside these
    clip_grad_norm_([nn.Parameter(torch.ones(2))], SMALL)
    assert recorded(probe)["clips_of_nothing"] == 0
