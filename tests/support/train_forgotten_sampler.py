"""A script under torchrun whose loader has no sampler; with ``--healthy``, one with shards."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankscope


def main() -> None:
    """Train for 30 steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(480, 8), torch.randint(4, (480,)))
    sampler = DistributedSampler(data) if options.healthy else None
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    announce = not options.silent
    with rankscope.watch(model, optimizer, run_dir=options.run_dir, announce=announce) as scope:
        for _, (inputs, labels) in zip(range(30), loader, strict=False):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            scope.loss(loss.detach(), len(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
