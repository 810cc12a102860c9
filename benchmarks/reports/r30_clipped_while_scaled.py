"""R30, miles-credit#141: gradients are clipped while the scaler's factor is still in them."""

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch.nn.parallel import DistributedDataParallel

chosen = options()
rank, world = begin()
model = Language()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=40)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    with torch.autocast("cpu", dtype=torch.float16):
        logits = wrapped(tokens)
    loss = next_token_loss(logits.float(), tokens)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    if chosen.right:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
end(model, loss)
