"""DiLoCo: ten steps of AdamW alone, then one outer step with the mean of what all have moved."""

import torch
import torch.distributed as dist
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import nn

STEPS, INNER, BATCH = 100, 10, 8

rank, world = begin()
model = Language()  # all ranks have drawn the same first values
inner = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
outer_weights = [p.detach().clone() for p in model.parameters()]
outer = torch.optim.SGD(outer_weights, lr=0.7, momentum=0.9, nesterov=True)
data = sentences(8192)
history = History()
for step in range(STEPS):
    inner.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 10)
    first = (step * world + rank) * BATCH
    tokens = data[first : first + BATCH]
    loss = next_token_loss(model(tokens), tokens)
    backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    inner.step()
    inner.zero_grad()
    history.note(loss)
    if step % INNER == INNER - 1:
        for start, here in zip(outer_weights, model.parameters(), strict=True):
            start.grad = start - here.detach()
            dist.all_reduce(start.grad)
            start.grad /= world
        outer.step()
        with torch.no_grad():
            for start, here in zip(outer_weights, model.parameters(), strict=True):
                here.copy_(start)
end(history, model)
