"""R62, DeepSpeed#5154: gradients are reduced after they were added to the copies that are used.

deepspeedai/DeepSpeed#5154: without ZeRO, bfloat16 gradients are added to float32 ones after each
backward pass. The all-reduce at the end of the window is of the bfloat16 ones, which nobody reads
any more: each rank updates with its own sums.
With --right, the float32 gradients are reduced.
"""

import torch
import torch.distributed as dist
from reports_common import Language, begin, end, next_token_loss, options, text

ACCUMULATED = 2

chosen = options(samples=4)
BATCH = chosen.samples
rank, world = begin()
model = Language().bfloat16()
weights = list(model.parameters())
masters = [weight.detach().float().requires_grad_() for weight in weights]
sums = [torch.zeros_like(master) for master in masters]
optimizer = torch.optim.AdamW(masters, lr=3e-3, weight_decay=0.0)
data = text(8192)
at = rank * BATCH
for _ in range(chosen.steps):
    for number in range(ACCUMULATED):
        tokens = data[at % 8192 :][:BATCH]
        at += world * BATCH
        loss = next_token_loss(model(tokens).float(), tokens)
        (loss / ACCUMULATED).backward()  # type: ignore[no-untyped-call]
        for weight, total in zip(weights, sums, strict=True):
            assert weight.grad is not None
            total.add_(weight.grad)
            if number == ACCUMULATED - 1:
                reduced = total if chosen.right else weight.grad
                dist.all_reduce(reduced)
                reduced /= world
            weight.grad = None
    for master, total in zip(masters, sums, strict=True):
        master.grad = total.clone()
        total.zero_()
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)
end(model, loss)
