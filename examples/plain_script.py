"""A plain DDP script that knows nothing of rankscope, and is watched without a change.

On 4 workers:

    torchrun --nproc-per-node 4 -m rankscope run examples/plain_script.py --steps 60
    rankscope report runs/plain_script

The same, when the launcher is a part of the command:

    rankscope run -- torchrun --nproc-per-node 4 examples/plain_script.py --steps 60
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(size: int = 2048) -> TensorDataset:
    """Return points in 16 dimensions, and which of 4 noisy planes each lies above."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(size, 16, generator=generator)
    planes = torch.randn(16, 4, generator=generator)
    noise = torch.randn(size, 4, generator=generator)
    return TensorDataset(points, (points @ planes + noise).argmax(dim=1))


def main() -> None:
    """Train a small classifier."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = make_data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    micro, epoch = 0, 0
    while micro < options.steps * options.accumulate:
        sampler.set_epoch(epoch)
        for x, y in loader:
            last = (micro + 1) % options.accumulate == 0
            model.require_backward_grad_sync = last
            loss = F.cross_entropy(model(x), y)
            (loss / options.accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            micro += 1
            if micro == options.steps * options.accumulate:
                break
        epoch += 1
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
