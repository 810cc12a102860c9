"""FSDP2, saved with ``torch.distributed.checkpoint``: a schedule, dropout."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--folder", type=Path)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--forget", default="", help="what the resumption does not restore")
parser.add_argument("--one-for-all", action="store_true", help="a name for all random states")
chosen = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])

draw = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(512, 16, generator=draw), torch.randint(8, (512,), generator=draw)
order = list(DistributedSampler(range(512), world, rank))  # type: ignore[arg-type]
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(), nn.Dropout(chosen.dropout), nn.LayerNorm(64), nn.Linear(64, 8)
)
torch.manual_seed(1 + rank)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)


def state(step: int) -> dict[str, Any]:
    """Return what is saved; of what all ranks save by one name, one rank's is written."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    found = {
        "model": of_model,
        "optimizer": of_optimizer,
        "schedule": schedule.state_dict(),
        "step": torch.tensor(step),
    }
    if chosen.dropout:
        name = "random" if chosen.one_for_all else f"random.{rank}"
        found[name] = torch.get_rng_state()
    return found


first = 0
if chosen.resume:
    saved = {name: one for name, one in state(0).items() if name != chosen.forget}
    dcp.load(saved, checkpoint_id=chosen.folder)
    set_model_state_dict(model, saved["model"])
    if "optimizer" in saved:
        set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    if "schedule" in saved:
        schedule.load_state_dict(saved["schedule"])
    for name in ("random", f"random.{rank}"):
        if name in saved:
            torch.set_rng_state(saved[name])
    first = int(saved.get("step", 0))
for step in range(first, 20):
    own = order[step * chosen.batch : (step + 1) * chosen.batch]
    F.cross_entropy(model(inputs[own]), labels[own]).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step + 1 == chosen.save_at:
        dcp.save(state(step + 1), checkpoint_id=chosen.folder)
dist.destroy_process_group()
