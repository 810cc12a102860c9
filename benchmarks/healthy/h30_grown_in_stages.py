# ruff: noqa: D102
"""A network that grows: small pictures, then whole ones in a new DDP; new layers fade in."""

import torch
from common import History, backward, begin, end, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FIRST, SECOND, FADE = 45, 60, 25


class Growing(nn.Module):
    """A stem for small pictures, and later another one for whole ones, on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Conv2d(3, 12, 3, padding=1)
        self.trunk = nn.Sequential(
            nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(16 * 16, 10)
        self.whole: nn.Sequential | None = None
        self.share = 0.0

    def grow(self) -> None:
        self.whole = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 2, stride=2)
        )

    def forward(self, seen: Tensor) -> Tensor:
        if self.whole is None:
            hidden = self.small(seen)
        else:
            hidden = self.share * self.whole(seen)
            if self.share < 1:  # faded out, it gets no gradient on any rank
                hidden = hidden + (1 - self.share) * self.small(F.avg_pool2d(seen, 2))
        logits: Tensor = self.head(self.trunk(hidden).flatten(1))
        return logits


class Stage:
    """Batches of one size without end, in an order of their own per stage."""

    def __init__(self, batch: int, seed: int) -> None:
        data = TensorDataset(*pictures(1200))
        self.sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=seed)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler, drop_last=True)
        self.epoch = -1
        self.left = iter(self.loader)

    def batch(self) -> list[Tensor]:
        found: list[Tensor] | None = next(self.left, None) if self.epoch >= 0 else None
        if found is None:
            self.epoch += 1
            self.sampler.set_epoch(self.epoch)
            self.left = iter(self.loader)
            found = next(self.left)
        return found


def main() -> None:
    begin()
    model = Growing()
    history = History()

    parallel = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stage = Stage(48, seed=1)
    for _ in range(FIRST):
        seen, labels = stage.batch()
        loss = F.cross_entropy(parallel(F.avg_pool2d(seen, 2)), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        history.note(loss)

    del parallel
    model.grow()
    assert model.whole is not None
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    old = [*model.small.parameters(), *model.trunk.parameters(), *model.head.parameters()]
    optimizer = torch.optim.Adam(
        [{"params": model.whole.parameters(), "lr": 3e-3}, {"params": old, "lr": 1e-3}]
    )
    stage = Stage(24, seed=2)
    for step in range(SECOND):
        model.share = min(1.0, (step + 1) / FADE)
        seen, labels = stage.batch()
        loss = F.cross_entropy(parallel(seen), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        history.note(loss)
    end(history, model)


if __name__ == "__main__":
    main()
