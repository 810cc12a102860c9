"""Two replicas of a pipeline of two stages, written by hand: a stage waits for what it receives."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
replica, stage = divmod(rank, 2)
workers = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
torch.manual_seed(stage)
model = nn.Linear(8, 4) if stage else nn.Sequential(nn.Linear(8, 8), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    torch.manual_seed(10 * step + replica)
    inputs, targets = torch.randn(4, 8), torch.randint(0, 4, (4,))
    if stage == 0:
        hidden = model(inputs)
        dist.send(hidden.detach(), rank + 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, rank + 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(4, 8)
        dist.recv(hidden, rank - 1)
        nn.functional.cross_entropy(model(hidden.requires_grad_()), targets).backward()
        dist.send(hidden.grad, rank - 1)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=workers)
        parameter.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), Path(os.environ["TRAINED"]) / f"{rank}.pt")
