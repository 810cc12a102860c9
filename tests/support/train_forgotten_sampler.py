"""A script under torchrun that trains in the ways it is told to, one after the other.

In ``forgotten`` and in ``silent`` the loader has no sampler; in ``healthy`` it has shards.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankscope


def train(way: str, run_dir: Path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(480, 8), torch.randint(4, (480,)))
    sampler = DistributedSampler(data) if way == "healthy" else None
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    announce = way != "silent"
    with rankscope.watch(model, optimizer, run_dir=run_dir, announce=announce) as scope:
        for _, (inputs, labels) in zip(range(30), loader, strict=False):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            scope.loss(loss.detach(), len(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Train in all ways, each with a record of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("ways", nargs="+")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for way in options.ways:
        train(way, options.folder / way)
        dist.barrier()
    dist.destroy_process_group()


main()
