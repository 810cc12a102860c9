# ruff: noqa: D102
"""R82, AReno#510: what the experts of two ranks make of different tokens is added up.

inclusionAI/AReno#510: under sequence parallelism each rank of a group has other positions. Its
experts see these alone, and their outputs are summed over the group place by place: each position
gets what the other rank's experts made of another one.
With --right, positions and routes are gathered first, and each rank keeps its part of the sum.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, gather, sum_over, text
from reports_layouts import begin, end, options
from reports_sequences import PartAttention
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

WIDTH, HEADS, EXPERTS, LENGTH, GLOBAL_BATCH = 32, 4, 4, 24, 16

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS
group, part, data_rank = None, 0, 0
if world > 1:
    mesh = init_device_mesh("cpu", (DATA_PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    group, part = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    data_rank = mesh["dp"].get_local_rank()


class _SumAndKeepPart(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(PARTS, 1)[part].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(PARTS)]
        dist.all_gather(parts, gradient.contiguous(), group=group)
        return torch.cat(parts, 1)


class Mixture(nn.Module):
    """Each token goes to its most likely expert; each rank of the group has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_group, self.num_local_experts = group, EXPERTS // PARTS
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        everyone = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        ]
        mine = range(EXPERTS)[part * self.num_local_experts :][: self.num_local_experts]
        self.first, self.experts = mine[0], nn.ModuleList(everyone[number] for number in mine)
        for parameter in self.experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = self.norm(hidden)
        chances = self.router(tokens).softmax(-1)
        if chosen.right and group is not None:
            tokens, chances = gather(tokens, 1, group), gather(chances, 1, group)
        best = chances.argmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts, self.first):
            weight = chances[..., number] * (best == number)
            mixed = mixed + weight[..., None] * expert(tokens)
        if group is None:
            return hidden + mixed
        if chosen.right:
            own: Tensor = _SumAndKeepPart.apply(mixed)  # type: ignore[no-untyped-call]
            return hidden + own
        return hidden + sum_over(mixed, group)


class Model(nn.Module):
    """Embeddings, two layers of attention and experts, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(PartAttention(WIDTH, HEADS, group) for _ in range(2))
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(places)
        mask = places[:, None] >= torch.arange(LENGTH)
        for attention, mixture in zip(self.attention, self.mixtures, strict=True):
            hidden = mixture(attention(hidden, mask))
        logits: Tensor = self.head(hidden)
        return logits


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH + 1)
places = torch.arange(LENGTH).chunk(PARTS)[part]
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH].chunk(DATA_PARTS)[data_rank]
    tokens, labels = batch[:, :-1][:, places], batch[:, 1:][:, places]
    loss = F.cross_entropy(model(tokens, places).flatten(0, 1), labels.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters() if world > 1 else ():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=mesh["dp"].get_group() if "experts" in name else None)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
