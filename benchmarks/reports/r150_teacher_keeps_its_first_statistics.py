"""R150, cosmix-uda#21: the teacher is an average of parameters, and keeps its first statistics.

saltoricristiano/cosmix-uda#21: a student learns from labels of one domain, and from the answers of
its teacher in another one. The teacher is an average of the student's parameters. Buffers are left
out: its batch norms have the statistics that they began with, and fit its weights less and less.
With --right, floating buffers are averaged, and others copied.
"""

import copy

import torch
from reports_common import begin, end, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, SAMPLES, DECAY = 12, 5, 16, 0.95

chosen = options()
rank, world = begin()
centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(3))


def points(number: int, shift: float) -> tuple[Tensor, Tensor]:
    """Draw points of a domain and their classes."""
    draw = torch.Generator().manual_seed(number)
    classes = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return centres[classes] + torch.randn(SAMPLES, WIDTH, generator=draw) + shift, classes


student = nn.Sequential(
    nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(),
    nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES),
)  # fmt: skip
teacher = copy.deepcopy(student).requires_grad_(False).eval()
wrapped = DistributedDataParallel(student)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
for step in range(chosen.steps):
    known, labels = points(1000 + step * world + rank, 0.0)
    unknown, _ = points(100_000 + step * world + rank, 1.0)
    answers = teacher(unknown).softmax(-1)
    logits = wrapped(torch.cat([known, unknown]))
    loss = F.cross_entropy(logits[:SAMPLES], labels)
    loss = loss + 0.5 * F.cross_entropy(logits[SAMPLES:], answers)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(teacher.parameters(), wrapped.parameters(), strict=True):
            mine.mul_(DECAY).add_(theirs, alpha=1 - DECAY)
        for old, new in zip(teacher.buffers(), wrapped.buffers(), strict=True):
            if chosen.right and old.is_floating_point():
                old.mul_(DECAY).add_(new, alpha=1 - DECAY)
            elif chosen.right:
                old.copy_(new)
end(student, loss)
