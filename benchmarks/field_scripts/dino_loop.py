"""A loop as in DINO: a sum over pairs of views that is divided by their number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VIEWS, WIDTH = 4, 32
dist.init_process_group("gloo")
torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(24, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


student, teacher = DistributedDataParallel(network()), network()
teacher.load_state_dict(student.module.state_dict())
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
torch.manual_seed(100 + dist.get_rank())
for _ in range(24):
    image = torch.randn(8, 24)
    views = torch.cat([image + 0.3 * torch.randn(8, 24) for _ in range(VIEWS)])
    with torch.no_grad():
        targets = F.softmax(teacher(views[:16]) / 0.04, -1).chunk(2)
    outputs = F.log_softmax(student(views) / 0.1, -1).chunk(VIEWS)
    loss, terms = 0, 0
    for first, target in enumerate(targets):
        for second, output in enumerate(outputs):
            if first != second:
                loss = loss + torch.sum(-target * output, -1).mean()
                terms += 1
    loss = loss / terms
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(teacher.parameters(), student.module.parameters(), strict=True):
            mine.mul_(0.99).add_(0.01 * theirs)
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.6f}")
dist.destroy_process_group()
