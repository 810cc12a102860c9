# ruff: noqa: D102
"""R19, FastVideo#1440: an average that should begin late holds the untrained weights."""

from typing import Any

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

START, DECAY = 50, 0.98

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()
model = Language()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data, valid = text(4096), text(64, seed=2)


def own(parameter: nn.Parameter) -> Tensor:
    whole: Any = parameter.data
    shard: Tensor = whole.to_local()
    return shard


class Average:
    """A moving average of this rank's shards."""

    def __init__(self, model: nn.Module) -> None:
        self.shards = {name: own(p).clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shards[name].lerp_(own(p), 1 - DECAY)

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            kept = own(p).clone()
            own(p).copy_(self.shards[name])
            self.shards[name] = kept


average = None if chosen.right else Average(model)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 4096 :][:SAMPLES]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step >= START and average is None:
        average = Average(model)
    elif average is not None:
        average.update(model)
assert average is not None
assert isinstance(model, FSDPModule)
average.exchange(model)
with torch.no_grad():
    value = next_token_loss(model(valid), valid).item()
model.reshard()
average.exchange(model)
if rank == 0:
    print(f"average {value:.4f}")
end(model, loss)
