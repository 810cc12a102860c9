"""Directional derivatives under FSDP2, where layers are divided by code of the model's own."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import rankscope
from rankscope import Run
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS, CHECKED, WIDTH = 4, 2, 8


class Copy(torch.autograd.Function):
    """Leaves a tensor alone, and adds up its gradient over a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Adds a tensor up over a group, and leaves its gradient alone."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Divided(nn.Module):
    """Two layers whose hidden units are divided over a mesh, each rank with its own part."""

    def __init__(self, mesh: DeviceMesh, *, shares: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        up, down = torch.randn(2 * WIDTH, WIDTH) / 3, torch.randn(WIDTH, 2 * WIDTH) / 3
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(1)]))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.group, self.number, self.shares = mesh.get_group(), mesh.size(), shares

    def forward(self, x: Tensor) -> Tensor:
        hidden = (Copy.apply(self.norm(x), self.group) @ self.up.to_local().T).relu()
        own = hidden @ self.down.to_local().T
        if self.shares:  # of the bias's gradient, each rank gets its share of the whole
            return x + Sum.apply(own + self.bias / self.number, self.group)
        return x + Sum.apply(own, self.group) + self.bias


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, *, shares: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.block = Divided(mesh, shares=shares)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.head(self.block(self.embed(x))) - target).square().mean()}


def train(rank: int, run_dir: str | None, shares: bool) -> list[bytes]:
    """Train; return the bits of this rank's shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model(mesh["tp"], shares=shares)
    fully_shard(model.block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = run_dir and rankscope.watch(
        model,
        optimizer,
        run_dir=run_dir,
        announce=False,
        agent="thread",
        canary=False,
        verify_at=(CHECKED,),
    )
    for step in range(STEPS):
        torch.manual_seed(2 * step + mesh["dp"].get_local_rank())
        batch = torch.randn(16, WIDTH)
        model(batch, batch.flip(1))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    if scope:
        scope.close()
    return [p.to_local().detach().numpy().tobytes() for p in model.parameters()]


def train_all(rank: int, folder: str) -> bool:
    watched = [train(rank, f"{folder}/{shares}/run", shares) for shares in (True, False)]
    return watched == [train(rank, None, shares) for shares in (True, False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    assert all(run_ranks(train_all, 4, str(folder))), "the training has other bits"
    return folder


@pytest.mark.parametrize("shares", [True, False])
def test_a_gradient_of_which_each_rank_has_a_share_is_named(folder: Path, shares: bool) -> None:
    for run in sorted((folder / str(shares)).iterdir()):
        [finding] = [f for f in Run.open(run).findings() if f.cause.startswith("verify.")]
        if shares:
            assert (finding.cause, finding.severity.name) == ("verify.derivative", "ERROR")
            assert "block.bias" in finding.explanation
        else:
            assert finding.cause == "verify.agrees", finding.explanation
