"""A loop with Accelerate: accumulation, clipping, and a schedule where it is asked for."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--schedule", action="store_true", help="with a length in updates")
chosen = parser.parse_args()
torch.set_num_threads(1)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen.accumulate)
draw = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(512, 16, generator=draw), torch.randint(8, (512,), generator=draw))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, chosen.batch))
if chosen.schedule:
    schedule = accelerator.prepare(schedule)
for inputs, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if chosen.schedule:
            schedule.step()
        optimizer.zero_grad()
