# ruff: noqa: D102
"""R48, Megatron-LM#5956: gradients of experts are too large by the size of expert parallelism.

NVIDIA/Megatron-LM#5956: tokens of all ranks of expert parallelism reach a rank's experts, so that
their gradient is a sum over these ranks before any reduction. The sharding then averages it over
the ranks that hold the same experts only. Here it is twice what is meant; the rest is right.
With --right, the experts' gradients are divided by the number of all ranks.
Four ranks: experts are divided over two, and each half is sharded over two by FSDP2.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, Block, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

WIDTH, EXPERTS, PARALLEL = 32, 4, 2

chosen = options(steps=110)
rank, world = begin()
mesh = init_device_mesh("cpu", (world // PARALLEL, PARALLEL), mesh_dim_names=("replica", "expert"))
group, place = mesh["expert"].get_group(), mesh["expert"].get_local_rank()


class Experts(nn.Module):
    """The rank's own experts."""

    def __init__(self) -> None:
        super().__init__()
        ups = torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5
        downs = torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5
        own = slice(place * EXPERTS // PARALLEL, (place + 1) * EXPERTS // PARALLEL)
        self.ups, self.downs = nn.Parameter(ups[own].clone()), nn.Parameter(downs[own].clone())

    def forward(self, tokens: Tensor, which: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for at in range(len(self.ups)):
            mine = (which == at).nonzero().squeeze(1)
            done = F.gelu(tokens[mine] @ self.ups[at]) @ self.downs[at]
            out = out.index_add(0, mine, done)
        return out


class Exchange(Function):
    """Sends rows to the other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        out = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(out, gradient.contiguous(), sent, received, group=group)
        return out, None, None


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out: Tensor = Exchange.apply(rows, sent, received)  # type: ignore[no-untyped-call]
    return out


class Mixture(nn.Module):
    """Sends each token to the rank of its expert, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        flat = self.norm(hidden).flatten(0, 1)
        weight, expert = torch.softmax(self.router(flat), -1).max(-1)
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert // (EXPERTS // PARALLEL), minlength=PARALLEL)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        there, back = sent.tolist(), received.tolist()
        which = exchange(expert[order] % (EXPERTS // PARALLEL), there, back)
        done = self.experts(exchange(flat[order], there, back), which)
        returned = exchange(done, back, there)
        mixed = torch.zeros_like(flat).index_copy(0, order, returned) * weight[:, None]
        return hidden + mixed.view_as(hidden)


class Language(nn.Module):
    """Embedding, dense blocks and mixtures in turn, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 0.0, True) for _ in range(2))
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block, mixture in zip(self.blocks, self.mixtures, strict=True):
            hidden = mixture(block(hidden))
        logits: Tensor = self.head(hidden)
        return logits


model = Language()
everyone = init_device_mesh("cpu", (world,))
for mixture in model.mixtures:
    assert isinstance(mixture, Mixture)
    experts = fully_shard(mixture.experts, mesh=mesh["replica"])
    if chosen.right:
        experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
        experts.set_gradient_divide_factor(float(world))
for block in (*model.blocks, *model.mixtures):
    fully_shard(block, mesh=everyone)
fully_shard(model, mesh=everyone)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 6 % 4096 :][:6]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
