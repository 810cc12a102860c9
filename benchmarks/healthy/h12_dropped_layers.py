# ruff: noqa: D102
"""Whole layers are left out at random, on each rank others, with labels to ignore."""

import torch
from common import VOCABULARY, Block, History, backward, begin, end, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, DEPTH, WIDTH = 100, 16, 5, 32


class Thinned(nn.Module):
    """Predicts the next token; a layer is skipped with a probability that grows with its depth."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, dropout=0.1) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for depth, layer in enumerate(self.layers, 1):
            if self.training and torch.rand(()) < 0.4 * depth / DEPTH:
                continue
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


rank, world = begin()
model = DistributedDataParallel(Thinned(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
data = sentences(8192)
torch.manual_seed(500 + rank)
history = History()
for step in range(STEPS):
    first = (step * world + rank) * BATCH % 8192
    tokens = data[first : first + BATCH]
    answer = torch.arange(1, tokens.shape[1]) >= torch.randint(2, 16, (BATCH, 1))
    labels = torch.where(answer, tokens[:, 1:], -100)  # the prompt does not count
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.05)
    optimizer.zero_grad()
    backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    history.note(loss)
end(history, model)
