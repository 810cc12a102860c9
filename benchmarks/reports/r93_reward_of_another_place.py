# ruff: noqa: D102
"""R93, slime#2375: the reward of an answer lies at the last place that the first rank has.

THUDM/slime#2375: under context parallelism each rank has two pieces of a sequence, one from the
front and one from the back. The reward of an answer belongs to its last token. The first rank adds
it to the last one of its own; where the answer ends in a piece of another rank, that is an earlier
token, and what comes after it gets no return.
With --right, the rank adds it that has the answer's last token.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options, sum_over_ranks
from reports_sequences import PartAttention
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, PROMPT, BATCH, LATER = 32, 4, 48, 6, 8, 0.95

chosen = options()
rank, world = begin()


def places_of(part: int) -> Tensor:
    """Give a rank's places: the front and the back get the same work."""
    pieces = torch.arange(LENGTH).chunk(2 * world)
    return torch.cat([pieces[part], pieces[2 * world - 1 - part]])


class Model(nn.Module):
    """Embeddings, two layers of attention, head."""

    def __init__(self) -> None:
        super().__init__()
        group = dist.group.WORLD if world > 1 else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(PartAttention(WIDTH, HEADS, group) for _ in range(2))
        self.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU())
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits: Tensor = self.head(self.between(hidden))
        return logits


def returns_of(answered: Tensor, scores: Tensor, own: Tensor) -> Tensor:
    """Give the return of each token of the answers, at all places."""
    rewards = torch.zeros(answered.shape)
    mine = answered & torch.zeros(LENGTH, dtype=torch.bool).index_fill(0, own, True)
    last = LENGTH - 1 - (answered if chosen.right else mine).flip(1).int().argmax(1)
    if chosen.right or rank == 0:
        belongs = mine[torch.arange(BATCH), last]
        rewards[torch.arange(BATCH), last] = scores * belongs
    sum_over_ranks(rewards)
    after = torch.zeros(BATCH)
    returns = torch.zeros_like(rewards)
    for at in reversed(range(LENGTH)):
        after = rewards[:, at] + LATER * after
        returns[:, at] = after
    return returns * answered


model = Model()
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
data = text(4096, LENGTH)
own = places_of(rank)
mask = own[:, None] >= torch.cat([places_of(part) for part in range(world)])
for step in range(chosen.steps):
    batch = data[step * BATCH % 4096 :][:BATCH]
    drawn = torch.Generator().manual_seed(step)
    lengths = torch.randint(PROMPT + 8, LENGTH, (BATCH, 1), generator=drawn)
    at = torch.arange(LENGTH)
    answered = (at >= PROMPT - 1) & (at < lengths - 1)  # places that predict a token of the answer
    scores = (batch % 5 == 0).float().mean(1) - 0.2
    returns = returns_of(answered, scores, own)
    following = batch.roll(-1, 1)
    logits = wrapped(batch[:, own], own.expand(BATCH, -1), mask.expand(BATCH, 1, -1, -1))
    chances = logits.log_softmax(-1).gather(-1, following[:, own, None]).squeeze(-1)
    loss = -world * (returns[:, own] * chances).sum() / answered.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
