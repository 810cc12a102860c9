# ruff: noqa: D102
"""Half precision, a loss scale by hand that starts too high, and targets with heavy tails."""

import torch
from common import History, backward, begin, end
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

UPDATES, BATCH, FEATURES = 110, 32, 12


class Claims(nn.Module):
    """Predicts the size of a claim; the last layer works in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.out = nn.Linear(48, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            hidden = self.body(inputs)
        return self.out(hidden.float()).squeeze(1)  # type: ignore[no-any-return]


rank, world = begin()
model = DistributedDataParallel(Claims())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
truth = torch.randn(FEATURES, generator=torch.Generator().manual_seed(5))
draw = torch.Generator().manual_seed(40 + rank)
scale, since = 2.0**24, 0
history = History()
for _ in range(UPDATES):
    inputs = torch.randn(BATCH, FEATURES, generator=draw)
    tail = torch.rand(BATCH, generator=draw).clamp_min(1e-4) ** -0.7  # its variance is infinite
    targets = inputs @ truth + tail
    if torch.rand((), generator=draw) < 0.03:
        targets[0] = float("nan")  # a claim without a number
    every = F.huber_loss(model(inputs), targets, reduction="none", delta=20.0)
    loss = torch.where(targets.isnan(), 0.0, every.nan_to_num()).mean()
    optimizer.zero_grad()
    backward(loss * scale)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # DDP has added up the gradients: an overflow on one rank is now one on all
    if all(bool(gradient.isfinite().all()) for gradient in gradients):
        for gradient in gradients:
            gradient.div_(scale)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        since += 1
        if since % 30 == 0:
            scale *= 2
    else:
        scale, since = scale / 2, 0
    history.note(loss)
end(history, model)
