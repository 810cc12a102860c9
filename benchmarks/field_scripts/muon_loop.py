"""A loop as in nanochat: Muon for matrices, AdamW for the rest, under DDP."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, CONTEXT, WIDTH = 64, 16, 32
dist.init_process_group("gloo")
torch.manual_seed(42 + dist.get_rank())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        logits = self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))
        return F.cross_entropy(15 * torch.tanh(logits / 15).flatten(0, 1), targets.flatten())


model = DistributedDataParallel(Model())
inner = model.module.block.parameters()
matrices = [parameter for parameter in inner if parameter.ndim == 2]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
for _ in range(24):
    tokens = torch.randint(0, VOCABULARY, (4, CONTEXT)).cummax(1).values
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print(f"loss {mean.item() / dist.get_world_size():.6f}")
sys.stdout.flush()
dist.destroy_process_group()
