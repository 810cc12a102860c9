# ruff: noqa: D102
"""R152, Megatron-LM#4494: the labels of a second prediction move over the borders of documents.

NVIDIA/Megatron-LM#4494: documents of a packed sequence are filled up so that each rank of context
parallelism has two equal pieces of each. A second head predicts the token after the next one: its
labels are the first head's, moved by one inside of each piece, with the following piece's first at
the end. The pieces are found by the documents' lengths without what fills them up.
With --right, by the lengths that the pieces were made with.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options
from reports_sequences import PartAttention
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH, IGNORED = 32, 4, 48, 8, -100

chosen = options()
rank, world = begin()
PIECES = 2 * world


class Model(nn.Module):
    """Embeddings, two layers of attention, two heads."""

    def __init__(self) -> None:
        super().__init__()
        group = dist.group.WORLD if world > 1 else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(PartAttention(WIDTH, HEADS, group) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.second = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, VOCABULARY))

    def forward(self, tokens: Tensor, position_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(tokens) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden), self.second(hidden)


def packed(step: int) -> tuple[list[int], list[int]]:
    """Give the documents' lengths, and those they are filled up to."""
    draw = torch.Generator().manual_seed(step)
    lengths: list[int] = []
    filled: list[int] = []
    while (room := LENGTH - sum(filled)) > 0:
        lengths.append(min(int(torch.randint(9, 20, (), generator=draw)), room))
        filled.append(-(-lengths[-1] // 4) * 4)
    return lengths, filled


def places_of(part: int, filled: list[int]) -> Tensor:
    """Give a rank's places: of each document, a piece of the front and one of the back."""
    places = []
    begun = 0
    for size in filled:
        pieces = torch.arange(begun, begun + size).chunk(PIECES)
        places += [pieces[part], pieces[PIECES - 1 - part]]
        begun += size
    return torch.cat(places)


def moved(labels: Tensor, sizes: list[int]) -> Tensor:
    """Move the own labels by one, document by document."""
    out = labels.clone()
    begun = 0
    for size in sizes:
        first, last = begun // world, (begun + size) // world
        front, back = labels[:, first:last].chunk(2, 1)
        firsts = torch.stack([front[:, 0], back[:, 0]])
        everywhere = [torch.empty_like(firsts) for _ in range(world)]
        if world > 1:
            dist.all_gather(everywhere, firsts)
        else:
            everywhere = [firsts]
        ignored = torch.full_like(front[:, 0], IGNORED)
        after_front = everywhere[rank + 1][0] if rank + 1 < world else firsts[1]
        after_back = everywhere[rank - 1][1] if rank > 0 else ignored
        rolled = [front[:, 1:], after_front[:, None], back[:, 1:], after_back[:, None]]
        out[:, first:last] = torch.cat(rolled, 1)
        begun += size
    return out


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
data = text(4096, LENGTH + 1)
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    lengths, filled = packed(step)
    document = torch.repeat_interleave(torch.arange(len(filled)), torch.tensor(filled))
    position = torch.cat([torch.arange(size) for size in filled])
    there = position < torch.tensor(lengths)[document]
    order = torch.cat([places_of(part, filled) for part in range(world)])
    own = places_of(rank, filled)
    mask = (document[own, None] == document[order]) & (position[own, None] >= position[order])
    labels = torch.where(there, batch[:, 1:], IGNORED)
    second = moved(labels[:, own], filled if chosen.right else lengths)
    shape = (BATCH, len(own))
    heads = wrapped(batch[:, own], position[own].expand(shape), mask.expand(BATCH, 1, -1, -1))
    losses = [
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        for logits, wanted in zip(heads, (labels[:, own], second), strict=True)
    ]
    loss = world * (losses[0] + 0.3 * losses[1]) / (labels != IGNORED).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
