"""A spike of the loss: back to the last checkpoint, and on behind the data that made it."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import History, backward, begin, end, pictures
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES, BATCH, BATCHES, SPIKE = 125, 8, 110, (53, 54)

rank, world = begin()
model = DistributedDataParallel(
    nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=BATCHES)
images, labels = pictures(SAMPLES)
# 125 samples on two ranks: the sampler repeats one of them at the end of each epoch
sampler: DistributedSampler[Any] = DistributedSampler(TensorDataset(images), seed=11)
torch.manual_seed(70 + rank)


def batches() -> Any:
    """Go through the epochs; some file on the way has broken pictures."""
    number, epoch = 0, 0
    while True:
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(BATCH):  # type: ignore[no-untyped-call]
            broken = 60 * torch.randn(len(rows), 3, 8, 8) if number in SPIKE else 0
            yield (
                number,
                images[rows] + 0.2 * torch.randn(len(rows), 3, 8, 8) + broken,
                labels[rows],
            )
            number += 1
        epoch += 1


history, recent = History(), [3.0]
with tempfile.TemporaryDirectory() as folder:
    place = Path(folder) / f"state-{rank}.pt"
    skip_until = -1
    for number, inputs, targets in batches():
        if number < skip_until:
            continue
        if number >= BATCHES:
            break
        if number % 20 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(copy.deepcopy({**state, "schedule": schedule.state_dict()}), place)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        history.note(loss)
        if mean.item() / world > 1 + 3 * sum(recent[-10:]) / len(recent[-10:]):
            saved = torch.load(place)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            skip_until = number + 4
        else:
            recent.append(mean.item() / world)
end(history, model)
