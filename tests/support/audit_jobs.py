"""Jobs on real ranks whose reduction errs on purpose."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope

STEPS, AT = 24, 5
KINDS = ("healthy", "element", "one worker", "bfloat16", "compression")


def train(rank: int, folder: str) -> dict[str, Any]:
    """Train each kind of job; returns what this rank found live, as JSON."""
    return {kind: _train(rank, kind, f"{folder}/{kind}") for kind in KINDS}


def _train(rank: int, kind: str, run_dir: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40)), bucket_cap_mb=0.005
    )
    steps = [-1]

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        values = bucket.buffer()
        small = values.bfloat16() if kind == "bfloat16" else values.clone()
        dist.all_reduce(small)
        values.copy_(small.to(values.dtype).div_(dist.get_world_size()))
        if steps[0] == AT and bucket.is_last():
            at = int(values.abs().argmax())
            if kind == "element" or (kind == "one worker" and rank == 1):
                values.view(torch.int32)[at] ^= 1 << 18
        if kind == "compression" and steps[0] >= AT and bucket.is_last():
            values[values.abs() < values.abs().median()] = 0
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(values)
        return future

    model.register_comm_hook(None, reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    with rankscope.watch(
        model, optimizer, run_dir=run_dir, reduced="sketch", overhead_budget=None
    ) as scope:
        for step in range(STEPS):
            steps[0] = step
            inputs = torch.randn(8, 40, generator=generator)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [finding.to_json() for finding in scope.findings]
