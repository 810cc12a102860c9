# ruff: noqa: D102
"""Self-distillation in the manner of DINO: crops, a centred slow teacher, a frozen last layer."""

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from common import History, backward, begin, end, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

STEPS, BATCH, OUT, LOCAL, HELD = 100, 16, 32, 3, 20


class Backbone(nn.Module):
    """Patches, two mixing layers, a projection whose last layer has unit rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 2, stride=2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(2)
        )
        self.project = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
        self.last = weight_norm(nn.Linear(16, OUT, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad = False

    def forward(self, crops: list[Tensor]) -> Tensor:
        """Encode all crops of one size at once, as the sizes differ."""
        out = []
        for size in sorted({crop.shape[-1] for crop in crops}, reverse=True):
            same = torch.cat([crop for crop in crops if crop.shape[-1] == size])
            hidden = self.patches(same).flatten(2).transpose(1, 2)
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            out.append(self.last(F.normalize(self.project(hidden.mean(1)), dim=-1)))
        return torch.cat(out)


class Matching(nn.Module):
    """Cross-entropy between crops, against a centre of all ranks."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, OUT))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        aims = ((teacher - self.centre) / 0.05).softmax(-1).detach().chunk(2)
        guesses = (student / 0.1).log_softmax(-1).chunk(2 + LOCAL)
        terms = [
            -(aim * guess).sum(-1).mean()
            for i, aim in enumerate(aims)
            for j, guess in enumerate(guesses)
            if i != j
        ]
        self.update(teacher)
        return torch.stack(terms).mean()

    @torch.no_grad()
    def update(self, teacher: Tensor) -> None:
        centre = teacher.sum(0, keepdim=True)
        dist.all_reduce(centre)
        self.centre.lerp_(centre / (len(teacher) * dist.get_world_size()), 0.1)


def crop(images: Tensor, size: int) -> Tensor:
    top, left = (int(torch.randint(0, 8 - size + 1, ())) for _ in range(2))
    part = images[..., top : top + size, left : left + size]
    return part + 0.2 * torch.randn_like(part)


rank, world = begin()
bare = Backbone()
teacher = copy.deepcopy(bare).requires_grad_(False)
student = DistributedDataParallel(bare)
matching = Matching()
decayed = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
others = [p for p in student.parameters() if p.requires_grad and p.ndim <= 1]
groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups)
images, _ = pictures(1024, classes=20)
torch.manual_seed(rank)
history = History()
for step in range(STEPS):
    done = (1 - math.cos(math.pi * step / STEPS)) / 2
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 3e-3 * min(1.0, (step + 1) / 10) * (1 - 0.9 * done)
        if number == 0:
            group["weight_decay"] = 0.04 + 0.36 * done
    rows = torch.randperm(1024 // world)[:BATCH] * world + rank
    large = [crop(images[rows], 8) for _ in range(2)]
    small = [crop(images[rows], 4) for _ in range(LOCAL)]
    loss = matching(student(large + small), teacher(large))
    optimizer.zero_grad()
    backward(loss)
    for parameter in student.parameters():  # each tensor is clipped by its own norm
        if parameter.grad is not None:
            parameter.grad.mul_((0.3 / (parameter.grad.norm() + 1e-6)).clamp(max=1))
    if step < HELD:  # the last layer waits until the centre has settled
        for name, parameter in student.named_parameters():
            if "last" in name:
                parameter.grad = None
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.04 * (1 - done))
    history.note(loss)
end(history, student, teacher)
