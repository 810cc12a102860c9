# ruff: noqa: D102
"""Contrastive pairs of a large batch: embeddings first, their gradients, then chunk by chunk."""

import math
from contextlib import nullcontext

import torch
from common import History, backward, begin, end, gathered
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, CHUNK, WIDTH = 90, 32, 8, 16


class Towers(nn.Module):
    """One tower for pictures, one for captions, and a scale of the angle between them."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = self.tower(24)
        self.caption = self.tower(12)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    @staticmethod
    def tower(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))

    def forward(self, pictures: Tensor, captions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = F.normalize(self.picture(pictures), dim=1)
        other = F.normalize(self.caption(captions), dim=1)
        return one, other, self.scale.exp()


def contrast(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """Compare each pair of all ranks with all others; the own rows have a gradient."""
    ones, others = gathered(one), gathered(other)
    mine = slice(rank * len(one), (rank + 1) * len(one))
    ones = torch.cat([ones[: mine.start], one, ones[mine.stop :]])
    others = torch.cat([others[: mine.start], other, others[mine.stop :]])
    logits = scale * ones @ others.T
    aims = torch.arange(len(logits))
    return (F.cross_entropy(logits, aims) + F.cross_entropy(logits.T, aims)) / 2


rank, world = begin()
model = DistributedDataParallel(Towers())
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
views = torch.Generator().manual_seed(3)
to_picture = torch.randn(6, 24, generator=views)
to_caption = torch.randn(6, 12, generator=views)
draw = torch.Generator().manual_seed(90 + rank)
torch.manual_seed(30 + rank)
history = History()
for _ in range(STEPS):
    meaning = torch.randn(BATCH, 6, generator=draw)
    pictures = (meaning @ to_picture + 0.3 * torch.randn(BATCH, 24, generator=draw)).split(CHUNK)  # type: ignore[no-untyped-call]
    captions = (meaning @ to_caption + 0.3 * torch.randn(BATCH, 12, generator=draw)).split(CHUNK)  # type: ignore[no-untyped-call]
    chunks = list(zip(pictures, captions, strict=True))
    states, kept = [], []
    with torch.no_grad():
        for chunk in chunks:  # dropout must be the same in the second pass
            states.append(torch.get_rng_state())
            kept.append(model(*chunk))
    one, other = (torch.cat([part[i] for part in kept]).requires_grad_() for i in (0, 1))
    scale = kept[0][2].detach().requires_grad_()
    loss = contrast(one, other, scale)
    slopes = torch.autograd.grad(loss, (one, other, scale))
    after = torch.get_rng_state()
    optimizer.zero_grad()
    parts = zip(chunks, states, slopes[0].split(CHUNK), slopes[1].split(CHUNK), strict=True)  # type: ignore[no-untyped-call]
    for number, (chunk, state, slope, second) in enumerate(parts):
        torch.set_rng_state(state)
        last = number == len(chunks) - 1
        with nullcontext() if last else model.no_sync():
            out = model(*chunk)
            # each rank has the gradient of the joint loss in its own rows alone
            stand_in = world * ((out[0] * slope).sum() + (out[1] * second).sum())
            if last:
                stand_in = stand_in + out[2] * slopes[2]
            backward(stand_in)
    torch.set_rng_state(after)
    optimizer.step()
    with torch.no_grad():
        model.module.scale.clamp_(max=math.log(100))
    history.note(loss)
end(history, model)
