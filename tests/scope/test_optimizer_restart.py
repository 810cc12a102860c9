"""What the optimizer and random generators hold over restarts, on real ranks."""

import copy
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from support.findings import told
from support.loops import watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 5


class Noisy(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.generator = torch.Generator().manual_seed(rank)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return self.layers[1](self.layers[0](x).tanh()).square().mean()


class Case:
    """A healthy job under DDP; what differs is for those that derive from it."""

    def __init__(self, rank):
        torch.manual_seed(0)
        self.net = Noisy(rank)
        self.model = self.wrap(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(1 + rank)

    def wrap(self, net):
        return DistributedDataParallel(net)

    def train(self, run_dir):
        with watch(self.model, self.optimizer, run_dir=run_dir, canary=False):
            for _ in range(STEPS):
                self.model(torch.randn(4, 6)).backward()
                self.optimizer.step()
                self.net.zero_grad()
            return self.saved()

    def saved(self):
        states = self.net.state_dict(), self.optimizer.state_dict()
        return *copy.deepcopy(states), self.net.generator.get_state()

    def load(self, saved):
        model, optimizer, random = saved
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(self.loaded(optimizer))
        self.net.generator.set_state(self.random(random))

    def loaded(self, optimizer):
        return optimizer

    def random(self, random):
        return random


class RandomOfRankZero(Case):
    def random(self, random):
        dist.broadcast(random, src=0)
        return random


class Sharded(Case):
    def wrap(self, net):
        return fully_shard(net)


class ShardedOfRankZero(Sharded):
    def loaded(self, optimizer):
        for state in optimizer["state"].values():
            dist.broadcast(state["exp_avg"].to_local(), src=0)
        return optimizer


RESTARTS = {Case: (Case, RandomOfRankZero), Sharded: (Sharded, ShardedOfRankZero)}
"""By the first job: what goes on from its record and its state."""


def train_all(rank, folder):
    warnings.simplefilter("ignore")
    for kind, cases in RESTARTS.items():
        first = f"{folder}/{kind.__name__}-first"
        saved = kind(rank).train(first)
        for case in cases:
            again = f"{folder}/{case.__name__}"
            if rank == 0:
                shutil.copytree(first, again)
            dist.barrier()
            job = case(rank)
            job.load(copy.deepcopy(saved))
            job.train(again)


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    run_ranks(train_all, 2, str(folder), timeout=240)


def found_in(folder, case):
    found = told(Run.open(folder / f"{case.__name__}-2"), "state.", "rng.", "sync.")
    found.pop("rng-begun-again", None)  # each attempt seeds anew
    return found


@pytest.mark.parametrize("case", RESTARTS)
def test_right_versions_raise_nothing(folder, case):
    assert found_in(folder, case) == {}


COPIED = "exp_avg is another rank's: rank 1 holds rank 0's"


@pytest.mark.parametrize(
    ("case", "cause", "severity", "ranks", "text"),
    [
        (ShardedOfRankZero, "state.resume_mismatch", Severity.ERROR, (1,), COPIED),
        (RandomOfRankZero, "rng.resume_mismatch", Severity.WARNING, (1,), "rank 1 holds rank 0's"),
    ],
)
def test_what_a_restart_loses_is_named(folder, case, cause, severity, ranks, text):
    found = found_in(folder, case)[cause]
    assert (found.severity, found.ranks, found.first_step) == (severity, ranks, STEPS)
    assert text in found.explanation
