"""A loop that averages all gradients by itself, as one flat tensor, and clips them: no wrapper."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CLASSES, FEATURES, WIDTH = 6, 20, 48
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()

torch.manual_seed(7)
model = nn.Sequential(
    nn.Linear(FEATURES, WIDTH),
    nn.GELU(),
    nn.LayerNorm(WIDTH),
    nn.Linear(WIDTH, WIDTH),
    nn.GELU(),
    nn.Linear(WIDTH, CLASSES),
)
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
centres = torch.randn(CLASSES, FEATURES)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(7 + RANK)


def average_gradients():
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= SIZE
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


for _ in range(24):
    labels = torch.randint(0, CLASSES, (16,))
    inputs = centres[labels] + torch.randn(16, FEATURES)
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    average_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if RANK == 0:
        print(f"loss {mean.item() / SIZE:.6f}")
sys.stdout.flush()
dist.destroy_process_group()
