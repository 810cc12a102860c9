"""R22, DeepSpeed#7839: only the float32 copies' gradients are cleared, the model's never are."""

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, next_token_loss, options, text
from torch import nn

chosen = options(steps=100, samples=8)
SAMPLES = chosen.samples
rank, world = begin()
model = Language().bfloat16()
masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95))
data = text(4096)


def average_gradients() -> None:
    for p in model.parameters():
        assert p.grad is not None
        whole = p.grad.float()
        dist.all_reduce(whole)
        p.grad.copy_(whole / world)


def update() -> float:
    """Step on the copies in float32, then round them into the model."""
    for p, master in zip(model.parameters(), masters, strict=True):
        assert p.grad is not None
        master.grad = p.grad.float()
    norm = nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)
    optimizer.zero_grad()
    if chosen.right:
        model.zero_grad()
    return norm.item()


for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 4096 :][:SAMPLES]
    loss = next_token_loss(model(tokens).float(), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    average_gradients()
    norm = update()
    if rank == 0 and step % 25 == 24:
        print(f"step {step}: loss {loss.item():.3f}, norm {norm:.3f}")
end(model, loss)
