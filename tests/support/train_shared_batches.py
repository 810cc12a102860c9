"""torchrun this: ranks 1 and 2 train on the same batches, several times.

Its arguments are a folder and, for each training, its name and how many steps it has. Where half
of them are done, a file NAME.mark is touched, and NAME.on is awaited; at its end each rank writes
NAME.RANK.json.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope


def train(run_dir, steps):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    told = []
    scope = rankscope.watch(
        model, optimizer, run_dir=run_dir, on_finding=lambda finding: told.append(step)
    )
    generator = torch.Generator().manual_seed(7 if rank in (1, 2) else rank)
    for step in range(steps):
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        loss.backward()
        scope.loss(loss.detach(), weight=8)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.08)
        if step == steps // 2:
            run_dir.with_suffix(".mark").touch()
            while not run_dir.with_suffix(".on").exists():
                time.sleep(0.01)
    scope.close()
    return {
        "training": run_dir.name,
        "findings": {finding.id: list(finding.ranks) for finding in scope.findings},
        "told_at": told[:1],
    }


def main():
    folder, *trainings = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, steps in zip(trainings[::2], trainings[1::2], strict=True):
        result = train(Path(folder) / name, int(steps))
        Path(folder, f"{name}.{dist.get_rank()}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


main()
