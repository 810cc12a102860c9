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


def train(rank, run_dir, sharded, saved=None, *, copied=False):
    """Train under FSDP2 or DDP, from what was saved; return what there is to save.

    ``copied``: each rank goes on with what rank 0 has saved of a moment, or of its generator.
    """
    torch.manual_seed(0)
    net = Noisy(rank)
    model = fully_shard(net) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    if saved is not None:
        parameters, moments, random = copy.deepcopy(saved)
        own = (
            [state["exp_avg"].to_local() for state in moments["state"].values()] if sharded else []
        )
        for tensor in (own or [random]) if copied else ():
            dist.broadcast(tensor, src=0)
        net.load_state_dict(parameters)
        optimizer.load_state_dict(moments)
        net.generator.set_state(random)
    with watch(model, optimizer, run_dir=run_dir, canary=False):
        for _ in range(STEPS):
            model(torch.randn(4, 6)).backward()
            optimizer.step()
            net.zero_grad()
        states = net.state_dict(), optimizer.state_dict()
        return *copy.deepcopy(states), net.generator.get_state()


KINDS = {"DDP": False, "FSDP2": True}


def train_all(rank, folder):
    warnings.simplefilter("ignore")
    for kind, sharded in KINDS.items():
        saved = train(rank, f"{folder}/{kind}-first", sharded)
        for name, copied in {kind: False, f"{kind} of rank 0": True}.items():
            if rank == 0:
                shutil.copytree(f"{folder}/{kind}-first", f"{folder}/{name}")
            dist.barrier()
            train(rank, f"{folder}/{name}", sharded, saved, copied=copied)


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    run_ranks(train_all, 2, str(folder), timeout=240)


def found_in(folder, name):
    found = told(Run.open(folder / f"{name}-2"), "state.", "rng.", "sync.")
    found.pop("rng-begun-again", None)  # each attempt seeds anew
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_right_versions_raise_nothing(folder, kind):
    assert found_in(folder, kind) == {}


COPIED = "rank 1 holds rank 0's"


@pytest.mark.parametrize(
    ("kind", "cause", "severity", "text"),
    [
        ("FSDP2", "state.resume_mismatch", Severity.ERROR, f"exp_avg is another rank's: {COPIED}"),
        ("DDP", "rng.resume_mismatch", Severity.WARNING, COPIED),
    ],
)
def test_what_a_restart_loses_is_named(folder, kind, cause, severity, text):
    found = found_in(folder, f"{kind} of rank 0")[cause]
    assert (found.severity, found.ranks, found.first_step) == (severity, (1,), STEPS)
    assert text in found.explanation
