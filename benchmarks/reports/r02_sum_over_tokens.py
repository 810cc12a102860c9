"""R02, miles#3231: FSDP2 gets the sum over tokens; nothing divides by their number."""

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, options, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()
model = Language()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(2048)
lengths = torch.randint(8, 23, (2048,), generator=torch.Generator().manual_seed(5))
answer = torch.arange(23)[None] >= 23 - lengths[:, None]

for step in range(chosen.steps):
    first = (step * world + rank) * SAMPLES % 2048
    tokens, mask = data[first : first + SAMPLES], answer[first : first + SAMPLES].float()
    each = F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    loss = (each * mask).sum()
    if chosen.right:
        everywhere = mask.sum()
        dist.all_reduce(everywhere)
        loss = loss * (world / everywhere)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
