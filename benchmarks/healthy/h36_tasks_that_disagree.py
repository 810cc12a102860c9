# ruff: noqa: D102
"""Two passes through DDP per update, one per task; conflict is taken out of the gradients."""

import torch
from common import History, backward, begin, end, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS, AVERAGE = 100, 50


class Shared(nn.Module):
    """One trunk, and a head for each of two tasks, one of which is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16)
        )
        self.heads = nn.ModuleList([nn.Linear(16, 10), nn.Linear(16, 10)])

    def forward(self, seen: Tensor, task: int = 0) -> Tensor:
        logits: Tensor = self.heads[task](F.relu(self.trunk(seen)))
        return logits


def gradient(model: nn.Module) -> Tensor:
    """Take the gradient away, as one vector; none is zero."""
    parts = []
    for weight in model.parameters():
        parts.append(torch.zeros_like(weight) if weight.grad is None else weight.grad.clone())
        weight.grad = None
    return torch.cat([part.flatten() for part in parts])


def without_conflict(one: Tensor, other: Tensor) -> Tensor:
    """Give both together, each without what goes against the other."""
    product = one @ other
    if product >= 0:
        return one + other
    return one - product / other.square().sum() * other + other - product / one.square().sum() * one


def main() -> None:
    begin()
    model = Shared()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averaged = AveragedModel(model)
    seen, labels = pictures(1600)
    other = torch.randperm(10)[(labels + 3 * (seen[:, 0].mean((1, 2)) > 0)) % 10]
    data = TensorDataset(seen, labels, other)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    history = History()
    for epoch in range(STEPS // len(loader)):
        sampler.set_epoch(epoch)
        for inputs, *targets in loader:
            total, vectors = 0.0, []
            for task, target in enumerate(targets):
                loss = F.cross_entropy(parallel(inputs, task), target)
                backward(loss)  # reduced by DDP
                vectors.append(gradient(model))
                total += loss.item()
            joint = without_conflict(*vectors)
            sizes = [weight.numel() for weight in model.parameters()]
            for weight, part in zip(model.parameters(), torch.split(joint, sizes), strict=True):
                weight.grad = part.view_as(weight).clone()
            optimizer.step()
            optimizer.zero_grad()
            history.note(total)
            if len(history.losses) >= AVERAGE and len(history.losses) % 2 == 0:
                averaged.update_parameters(model)
    update_bn([seen[at : at + 100] for at in range(0, 800, 100)], averaged)
    end(history, model, averaged)


if __name__ == "__main__":
    main()
