"""FSDP2 in bfloat16: tied weights, four micro-batches, a z-loss, an average of the shards."""

import torch
import torch.distributed as dist
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, BATCH, PARTS = 80, 4, 4

rank, world = begin()
model = Language(tied=True)
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=precision)
fully_shard(model, mp_policy=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
average = [parameter.detach().clone() for parameter in model.parameters()]
data, held_out = sentences(4096), sentences(64, seed=9)


def factor(step: int) -> float:
    """Warm up, stay, and decay in the last quarter."""
    return min(1.0, (step + 1) / 10, (STEPS - step) / (STEPS / 4))


@torch.no_grad()
def validate() -> float:
    model.eval()
    tokens = held_out[rank::world]
    loss = next_token_loss(model(tokens).float(), tokens)
    model.train()
    dist.all_reduce(loss)
    return loss.item() / world


history = History()
order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
for step in range(STEPS):
    optimizer.param_groups[0]["lr"] = 4e-3 * factor(step)
    total = torch.zeros(())
    for part in range(PARTS):
        first = ((step * PARTS + part) * world + rank) * BATCH
        tokens = data[order[torch.arange(first, first + BATCH) % 4096]]
        model.set_requires_gradient_sync(part == PARTS - 1)  # type: ignore[operator]
        logits = model(tokens).float()
        loss = next_token_loss(logits, tokens) + 1e-4 * logits.logsumexp(-1).square().mean()
        backward(loss / PARTS)
        total += loss.detach() / PARTS
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(average, model.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
    history.note(total)
    if step % 20 == 19:
        held_out_loss = validate()
        if rank == 0:
            print(f"validation after {step + 1} steps: {held_out_loss:.4f}", flush=True)
end(history, model)
