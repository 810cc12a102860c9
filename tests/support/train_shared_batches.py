"""torchrun this: ranks 1 and 2 train on the same batches. RUN_DIR STEPS MARK, a file to touch."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope


def main() -> None:
    run_dir, steps, mark = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    told: list[int] = []
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
        time.sleep(0.02)
        if step == steps // 3:
            mark.touch()
    scope.close()
    findings = {finding.id: list(finding.ranks) for finding in scope.findings}
    print("RESULT" + json.dumps({"findings": findings, "told_at": told[:1]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
