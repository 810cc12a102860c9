"""A loop with Accelerate: accumulation, clipping, a schedule and a resumption if asked for."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--schedule", action="store_true", help="with a length in updates")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--folder", type=Path)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--forget", default="", help="what the resumption does not restore")
parser.add_argument("--no-generator", action="store_true", help="the loader draws from torch's")
chosen = parser.parse_args()
torch.set_num_threads(1)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen.accumulate)
draw = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(512, 16, generator=draw), torch.randint(8, (512,), generator=draw))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(), nn.Dropout(chosen.dropout), nn.LayerNorm(64), nn.Linear(64, 8)
)
torch.manual_seed(1 + accelerator.process_index)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)
loader = DataLoader(
    data, chosen.batch, generator=None if chosen.no_generator else torch.Generator()
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if chosen.schedule and chosen.forget != "schedule":
    schedule = accelerator.prepare(schedule)
batches = loader
if chosen.resume and chosen.forget == "optimizer":
    weights = torch.load(chosen.folder / "pytorch_model.bin")
    accelerator.unwrap_model(model).load_state_dict(weights)
elif chosen.resume:
    accelerator.load_state(chosen.folder)
if chosen.resume and chosen.forget == "permuted":
    other = (accelerator.process_index + 1) % accelerator.num_processes
    states = torch.load(chosen.folder / f"random_states_{other}.pkl", weights_only=False)
    torch.set_rng_state(states["torch_manual_seed"])
if chosen.resume and chosen.forget != "samples":
    batches = skip_first_batches(loader, chosen.save_at)
for step, (inputs, labels) in enumerate(batches):
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if chosen.schedule:
            schedule.step()
        optimizer.zero_grad()
    if step + 1 == chosen.save_at and not chosen.resume:
        accelerator.save_state(chosen.folder, safe_serialization=False)
