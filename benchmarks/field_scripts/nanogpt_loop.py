"""A loop as in nanoGPT: the model returns logits and loss, which is divided by micro-batches."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO, VOCABULARY, CONTEXT, WIDTH = 4, 64, 16, 32
dist.init_process_group("gloo")
torch.manual_seed(1337 + dist.get_rank())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.embed(tokens) + self.place.weight
        logits = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = torch.randint(0, VOCABULARY, (4000,)).cummax(0).values * 7 % VOCABULARY


def batch():
    starts = torch.randint(0, len(data) - CONTEXT - 1, (4,))
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(24):
    total = torch.zeros(())
    for micro in range(MICRO):
        model.require_backward_grad_sync = micro == MICRO - 1
        _, loss = model(*batch())
        loss = loss / MICRO
        total += loss.detach()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.6f}")
sys.stdout.flush()
dist.destroy_process_group()
