"""Each rank has a domain of its own, with the weight that the mixture gives it."""

import torch
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 100, 8
WEIGHTS = (0.4, 0.8, 1.2, 1.6)  # of the domains; their mean is 1
NOISES = (0.02, 0.1, 0.3, 0.5)  # web pages are noisier than text books

rank, world = begin()
model = DistributedDataParallel(Language())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
data = sentences(1024, seed=20 + rank, noise=NOISES[rank])
order = torch.randperm(1024, generator=torch.Generator().manual_seed(rank))
history = History()
for step in range(STEPS):
    tokens = data[order[torch.arange(step * BATCH, (step + 1) * BATCH) % 1024]]
    loss = next_token_loss(model(tokens), tokens)
    optimizer.zero_grad()
    backward(loss * WEIGHTS[rank])
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    history.note(loss)
end(history, model)
