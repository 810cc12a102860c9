# ruff: noqa: D102
"""R96, accelerate#4177: what a layer remembers of a sequence begins anew on each rank.

huggingface/accelerate#4177: under sequence parallelism the ranks exchange what attention needs. A
layer of linear attention is none that is exchanged: its state runs along the sequence within the
layer, and begins with zeros where the part of each rank begins. The output of the first part is
right, its gradients are not.
With --right, a part begins with the states of those before it.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, gather, text
from reports_layouts import begin, data_parallel, end, options
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH, BATCH = 32, 48, 8

chosen = options()
rank, world = begin()


class LinearAttention(nn.Module):
    """Each place reads a state, to which all before it have added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        value = F.pad(value, (0, 1), value=1.0)  # the last column counts
        state = (key[..., None] * value[..., None, :]).cumsum(1)
        if world > 1 and chosen.right:
            ends = gather(state[:, -1:], 1, dist.group.WORLD)
            state = state + ends[:, :rank].sum(1, keepdim=True)
        read = (query[..., None] * state).sum(-2)
        out: Tensor = self.out(read[..., :-1] / read[..., -1:])
        return hidden + out


class Model(nn.Module):
    """Embeddings, two layers of linear attention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(LinearAttention() for _ in range(2))
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU())
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.between(hidden))
        return logits


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH)
places = torch.arange(LENGTH).chunk(world)[rank]
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    labels = F.pad(batch[:, 1:], (0, 1), value=-100)
    logits = wrapped(batch[:, places], places.expand(BATCH, -1))
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels[:, places].flatten(), ignore_index=-100, reduction="sum"
    )
    loss = world * loss / (labels != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
