"""Averages of the weights, and copies for an engine, beside trainings on real ranks."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.loops import watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 12


class Average(nn.Module):
    """An average whose decay grows with the number of updates, inside of the watched module."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = 0.99 * (1 - math.exp(-self.updates / 3))
        for mean, new in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(new, 1 - decay)


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.average = Average(self.model)

    def forward(self, x):
        return self.model(x).square().mean()


class Case:
    """A healthy job, stopped and taken up again."""

    def __init__(self, rank):
        torch.manual_seed(0)
        self.task = Task()
        self.wrapped = DistributedDataParallel(self.task)
        self.holder = nn.ModuleList([self.wrapped])  # leads to the same modules
        self.optimizer = torch.optim.SGD(self.task.model.parameters(), lr=0.05)
        self.prepare()
        torch.manual_seed(1 + rank)

    def prepare(self):
        pass

    def after_update(self):
        self.task.average.update(self.task.model)

    def train(self, run_dir, steps=STEPS):
        with watch(self.wrapped, self.optimizer, run_dir=run_dir, canary=False):
            for _ in range(steps):
                self.wrapped(torch.randn(4, 6)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.after_update()

    def load(self, other):
        self.task.load_state_dict(other.task.state_dict())
        self.task.average.updates = other.task.average.updates


class UpdatesForgotten(Case):
    def load(self, other):
        self.task.load_state_dict(other.task.state_dict())


class Engine(Case):
    """A frozen copy of other names gets the weights after each update."""

    def prepare(self):
        self.engine = nn.ModuleList(copy.deepcopy(self.task.model)).requires_grad_(False)

    @torch.no_grad()
    def after_update(self):
        for own, new in zip(self.engine.parameters(), self.given(), strict=True):
            own.copy_(new)

    def given(self):
        return list(self.task.model.parameters())


class EngineOfBase(Engine):
    def prepare(self):
        super().prepare()
        self.base = copy.deepcopy(self.engine)

    def given(self):
        return list(self.base.parameters())


class Narrow(Case):
    """The average is in bfloat16."""

    def prepare(self):
        self.own = copy.deepcopy(self.task.model).requires_grad_(False).bfloat16()

    @torch.no_grad()
    def after_update(self):
        for mean, new in zip(self.own.parameters(), self.task.model.parameters(), strict=True):
            mean.lerp_(new.to(mean.dtype), 0.01)


class NarrowCopy(Narrow):
    """Plain copies in bfloat16."""

    @torch.no_grad()
    def after_update(self):
        for own, new in zip(self.own.parameters(), self.task.model.parameters(), strict=True):
            own.copy_(new)


class Averaged(Case):
    """torch's own average, whose parameters are not frozen."""

    def prepare(self):
        self.own = AveragedModel(self.task.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after_update(self):
        self.own.update_parameters(self.task.model)


def train_all(rank, folder):
    for case in (Case, UpdatesForgotten):
        first = case(rank)
        first.train(f"{folder}/{case.__name__}")
        second = case(rank)
        second.load(first)
        second.train(f"{folder}/{case.__name__}")
    for case in (Engine, EngineOfBase, Narrow, NarrowCopy, Averaged):
        case(rank).train(f"{folder}/{case.__name__}", steps=2 * STEPS)
    train_sharded(f"{folder}/sharded")


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    run_ranks(train_all, 2, str(folder), timeout=240)


def found_in(folder, case, restarted=False):
    run = Run.open(folder / f"{case.__name__}{'-2' if restarted else ''}")
    causes = ("state.average_jumps", "state.average_rounded", "state.copy_never_changes")
    return [finding for finding in run.findings() if finding.cause in causes]


@pytest.mark.parametrize(
    ("case", "restarted"), [(Case, True), (Engine, False), (NarrowCopy, False), (Averaged, False)]
)
def test_copies_that_follow_the_model_are_healthy(folder, case, restarted):
    assert found_in(folder, case, restarted) == []


SHARE = 1 - 0.99 * (1 - math.exp(-1 / 3))


@pytest.mark.parametrize(
    ("case", "cause", "said"),
    [
        (UpdatesForgotten, "state.average_jumps", f"goes {SHARE:.3g} of its way to the model"),
        (EngineOfBase, "state.copy_never_changes", "ModuleList (84 elements) is written"),
        (Narrow, "state.average_rounded", "Sequential (84 elements) is kept in 16 bits"),
    ],
)
def test_a_copy_that_jumps_rests_or_is_lost_in_rounding_is_named(folder, case, cause, said):
    restarted = case is UpdatesForgotten
    [found] = found_in(folder, case, restarted)
    assert (found.cause, found.severity) == (cause, Severity.WARNING)
    assert said in found.explanation
    assert found.first_step == STEPS or not restarted


def test_the_share_of_torch_s_average_is_recorded(folder):
    run = Run.open(folder / "Averaged")
    rows = run.columns(Table.DIGESTS, "name", "digest", "rank")
    shares = {}
    for name, digest, rank in zip(rows["name"], rows["digest"], rows["rank"], strict=True):
        if str(name).endswith("|share") and rank == 0:
            shares.setdefault(str(name), []).append(np.int64(digest).view(np.float64))
    [own] = [found for found in shares.values() if max(found) > 0]
    np.testing.assert_allclose(own[1:], 0.1, rtol=1e-4)


def train_sharded(run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    average = copy.deepcopy(model).requires_grad_(False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer, run_dir=run_dir, canary=False):
        for _ in range(STEPS):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new.full_tensor(), 0.1)


def test_a_whole_average_beside_a_sharded_model_is_left_alone(folder):
    run = Run.open(folder / "sharded")
    assert run.num_rows(Table.STEPS) == STEPS
    assert not [finding for finding in run.findings() if finding.cause.startswith("state.")]
