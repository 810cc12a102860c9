"""R01, verl#5625: micro-batches weighted by samples, though each is a mean over its tokens."""

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, options, text
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

chosen = options(samples=4, micro_batches=4)
MICRO, SAMPLES = chosen.micro_batches, chosen.samples
rank, world = begin()
model = Language()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(4096)
draw = torch.Generator().manual_seed(5)
lengths = torch.randint(3, 23, (4096,), generator=draw)
answer = torch.arange(23)[None] >= 23 - lengths[:, None]  # the answer is at the sample's end


def token_losses(tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


for step in range(chosen.steps):
    first = (step * world + rank) * MICRO * SAMPLES % 4096
    rows = torch.arange(first, first + MICRO * SAMPLES) % 4096
    tokens_everywhere = answer[rows].sum().float()
    dist.all_reduce(tokens_everywhere)
    for part in torch.split(rows, SAMPLES):
        mask = answer[part].float()
        summed = (token_losses(data[part]) * mask).sum()
        if chosen.right:
            loss = summed / tokens_everywhere * world
        else:
            loss = summed / mask.sum() * (len(part) / len(rows))
        loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
