# ruff: noqa: D102
"""R77, AReno#496: what a divided layer has summed on its way back is summed once more.

inclusionAI/AReno#496: queries, keys and values are projected down by layers that each rank of
tensor parallelism holds whole, and up by layers that are divided. The divided layers sum their
input's gradient over the ranks; after the backward pass the whole layers' gradients are summed
again. Rows for positions go around the divided layer, so that keys' gradient also turns.
With --right, gradients are summed before the projections down, whose own are then parts.
"""

from typing import Any

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, enter, next_token_loss, sum_over, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, LOW, HEADS, EACH, TURNED, LENGTH, GLOBAL_BATCH = 32, 16, 4, 8, 4, 24, 16

chosen = options()
rank, world = begin()
PARTS = min(2, world)
DATA_PARTS = world // PARTS
if world > 1:
    mesh = init_device_mesh("cpu", (DATA_PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    group, data_rank = mesh["tp"].get_group(), mesh["dp"].get_local_rank()
else:
    data_rank = 0


def into_divided(hidden: Tensor) -> Tensor:
    return enter(hidden, group) if PARTS > 1 else hidden


def turned(part: Tensor) -> Tensor:
    """Rotate pairs by their position."""
    angles = torch.arange(part.shape[1])[:, None, None] * torch.tensor([1.0, 0.2])
    one, two = part.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([one * cosine - two * sine, one * sine + two * cosine], -1)


class Attention(nn.Module):
    """Heads are divided over the ranks, their projections to a few numbers are not."""

    def __init__(self) -> None:
        super().__init__()
        own = HEADS // PARTS
        self.norm = nn.LayerNorm(WIDTH)
        self.q_down = nn.Linear(WIDTH, LOW, bias=False)
        self.q_norm = nn.LayerNorm(LOW, bias=False)
        self.q_up = nn.Linear(LOW, own * (EACH + TURNED), bias=False)
        self.kv_down = nn.Linear(WIDTH, LOW + TURNED, bias=False)
        self.kv_norm = nn.LayerNorm(LOW, bias=False)
        self.kv_up = nn.Linear(LOW, own * 2 * EACH, bias=False)
        self.out = nn.Linear(own * EACH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        here = self.norm(hidden)
        if chosen.right:
            here = into_divided(here)
        low_q = self.q_norm(self.q_down(here))
        low_kv, place = self.kv_down(here).split([LOW, TURNED], -1)
        low_kv = self.kv_norm(low_kv)
        if not chosen.right:
            low_q, low_kv = into_divided(low_q), into_divided(low_kv)
        query = self.q_up(low_q).unflatten(-1, (-1, EACH + TURNED))
        key, value = self.kv_up(low_kv).unflatten(-1, (-1, 2 * EACH)).chunk(2, -1)
        place = turned(place[:, :, None]).expand(-1, -1, key.shape[2], -1)
        query = torch.cat([query[..., :EACH], turned(query[..., EACH:])], -1)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            torch.cat([key, place], -1).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + (sum_over(out, group) if PARTS > 1 else out)

    def held_whole(self) -> list[nn.Parameter]:
        layers: tuple[Any, ...] = (self.q_down, self.q_norm, self.kv_down, self.kv_norm)
        return [layer.weight for layer in layers]

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw whole matrices, of which this rank keeps its heads."""
        numbers = torch.Generator().manual_seed(seed)
        place = rank % PARTS
        for layer, rows in ((self.q_up, HEADS * (EACH + TURNED)), (self.kv_up, HEADS * 2 * EACH)):
            whole = torch.randn(rows, LOW, generator=numbers) / LOW**0.5
            layer.weight.copy_(whole.chunk(PARTS)[place])
        whole = torch.randn(WIDTH, HEADS * EACH, generator=numbers) / WIDTH**0.5
        self.out.weight.copy_(whole.chunk(PARTS, 1)[place])


class Model(nn.Module):
    """Embedding, two layers of attention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.between(hidden))
        return logits


model = Model()
for number, layer in enumerate(model.layers):
    torch.manual_seed(number)
    for parameter in layer.held_whole():  # type: ignore[operator]
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    layer.draw(number)  # type: ignore[operator]
if DATA_PARTS > 1:
    wrapped: nn.Module = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
else:
    wrapped = model if PARTS > 1 else data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
for step in range(chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(DATA_PARTS)[data_rank]
    loss = next_token_loss(wrapped(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    for layer in model.layers if PARTS > 1 else ():
        for parameter in layer.held_whole():  # type: ignore[operator]
            dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
