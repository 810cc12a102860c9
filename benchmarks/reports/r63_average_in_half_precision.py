"""R63, sd_dreambooth_extension#1417: the average of the weights is bfloat16, and stays behind.

d8ahazard/sd_dreambooth_extension#1417: with bfloat16 as type of the weights, the averaged copy has
it, too. A hundredth of a difference is rounded away in many of its numbers.
With --right, the copy is float32.
The loss that is printed is that of the averaged model.
"""

from copy import deepcopy

import torch
from reports_common import Language, begin, end, next_token_loss, options, text
from torch.nn.parallel import DistributedDataParallel

DECAY = 0.99

chosen = options(samples=8)
SAMPLES = chosen.samples
rank, world = begin()
model = Language()
average = deepcopy(model).requires_grad_(False)
if not chosen.right:
    average.bfloat16()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * SAMPLES % 4096 :][:SAMPLES]
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(wrapped(tokens).float(), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.to(mean.dtype), 1 - DECAY)
with torch.no_grad():
    held = text(64, seed=9)
    loss = next_token_loss(average(held).float(), held)
end(model, loss)
