"""FSDP2 that updates each shard as soon as its gradient is there, with recomputed activations."""

import torch
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, BATCH = 90, 8

rank, world = begin()
model = Language(depth=3, dropout=0.05)
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for number, block in enumerate(model.blocks):
    model.blocks[number] = fully_shard(checkpoint_wrapper(block), mp_policy=precision)  # type: ignore[assignment]
fully_shard(model, mp_policy=precision)
optimizers = {p: torch.optim.AdamW([p], lr=3e-3, fused=False) for p in model.parameters()}


def update(parameter: nn.Parameter) -> None:
    """Step and forget: no gradient outlives the backward pass."""
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]  # type: ignore[no-untyped-call]
data = sentences(8192)
torch.manual_seed(10 + rank)
history = History()
for step in range(STEPS):
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 8)
    first = (step * world + rank) * BATCH
    tokens = data[first : first + BATCH]
    loss = next_token_loss(model(tokens).float(), tokens)
    backward(loss)
    history.note(loss)
for hook in hooks:
    hook.remove()
end(history, model)
