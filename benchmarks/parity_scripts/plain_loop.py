"""A loop that saves with ``torch.save``: float16 by a gradient scaler, a schedule, dropout."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--folder", type=Path)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--forget", default="", help="what the resumption does not restore")
chosen = parser.parse_args()
torch.set_num_threads(1)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo")

draw = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(512, 16, generator=draw), torch.randint(8, (512,), generator=draw)
order = list(DistributedSampler(range(512), world, rank))  # type: ignore[arg-type]
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 8)
)
torch.manual_seed(1 + rank)
ddp = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
shared = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
first = 0
if chosen.resume:
    saved = torch.load(chosen.folder / "shared.pt")
    for name, one in shared.items():
        if name != chosen.forget:
            one.load_state_dict(saved[name])
    owner = {"permuted": (rank + 1) % world}.get(chosen.forget, rank)
    if chosen.forget != "random":
        torch.set_rng_state(torch.load(chosen.folder / f"random-{owner}.pt"))
    first = {"samples": 0, "batch": saved["step"] + 1}.get(chosen.forget, saved["step"])
for step in range(first, 20):
    own = order[step * chosen.batch : (step + 1) * chosen.batch]
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(ddp(inputs[own]), labels[own])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    optimizer.zero_grad()
    if step + 1 == chosen.save_at:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        torch.save(torch.get_rng_state(), chosen.folder / f"random-{rank}.pt")
        if rank == 0:
            states = {name: one.state_dict() for name, one in shared.items()}
            torch.save({**states, "step": step + 1}, chosen.folder / "shared.pt")
if world > 1:
    dist.destroy_process_group()
