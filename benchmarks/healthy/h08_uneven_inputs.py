"""Ranks with unequal shares of the data, which DDP's `join` lets end when they have to."""

import torch
from common import History, backward, begin, end, pictures
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH = 4, 16
SHARES = (26 * BATCH, 21 * BATCH)  # files of the data set were given out whole

rank, world = begin()
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
)
# Without momentum, as a rank that has ended takes over parameters, and no optimizer's state.
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, weight_decay=1e-4)
images, labels = pictures(sum(SHARES))
first = sum(SHARES[:rank])
history = History()
for epoch in range(EPOCHS):
    draw = torch.Generator().manual_seed(epoch * world + rank)
    order = first + torch.randperm(SHARES[rank], generator=draw)
    with model.join():
        for rows in order.split(BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            backward(loss)
            optimizer.step()
            history.note(loss)
    optimizer.param_groups[0]["lr"] *= 0.8
end(history, model)
