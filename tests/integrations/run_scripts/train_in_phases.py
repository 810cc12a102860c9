"""A script that trains one model after the other, and then the last one in a new wrapper."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from plain_training import Net, batch, digest
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def train(rank, model, optimizer, steps):
    for step in range(steps):
        x, y = batch(rank, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_all(rank):
    torch.manual_seed(0)
    kept = []  # so that earlier models live on, in training mode
    for _ in range(2):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(rank, model, optimizer, 6)
        kept.append((model, optimizer))
    model = DistributedDataParallel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(rank, model, optimizer, 5)
    return [digest(each) for each in (kept[0][0], model)]


def main():
    (output,) = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(f"{output}.{rank}").write_text(json.dumps(train_all(rank)))
    dist.barrier()


if __name__ == "__main__":
    main()
