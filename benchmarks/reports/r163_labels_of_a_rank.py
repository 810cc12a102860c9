"""R163, KERMT#21: each task's loss is divided by the labels that the rank has of it.

NVIDIA-BioNeMo/KERMT#21: molecules have labels for some of many tasks. The loss of a task is a mean
over the molecules of the rank that have its label, and the loss is a mean over tasks. DDP averages:
a label counts as much more, as the rank has fewer labels of its task.
With --right, a task's sum is divided by its labels on all ranks.
"""

import torch
from reports_layouts import begin, data_parallel, end, options, sum_over_ranks
from torch import nn
from torch.nn import functional as F

GLOBAL_BATCH, INPUTS, WIDTH, TASKS = 32, 24, 32, 8

chosen = options()
rank, world = begin()
draw = torch.Generator().manual_seed(1)
inputs = torch.randn(4096, INPUTS, generator=draw)
labels = (inputs @ torch.randn(INPUTS, TASKS, generator=draw) > 0).float()
often = torch.linspace(0.05, 0.9, TASKS)
masks = (torch.rand(4096, TASKS, generator=draw) < often).float()
model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, TASKS))
wrapped = data_parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(chosen.steps):
    rows = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).chunk(world)[rank] % 4096
    mask = masks[rows]
    losses = F.binary_cross_entropy_with_logits(
        wrapped(inputs[rows]), labels[rows], reduction="none"
    )
    counts = mask.sum(0)
    if chosen.right:
        counts = sum_over_ranks(counts.clone()) / world
    loss = ((losses * mask).sum(0) / counts.clamp(min=1 / world if chosen.right else 1)).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
