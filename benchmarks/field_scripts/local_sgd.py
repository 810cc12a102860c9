"""A loop with Accelerate's LocalSGD: parameters are averaged every 8 steps, gradients never."""

import sys

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs, truth = torch.randn(1600, 32), torch.randn(32, 8)
data = TensorDataset(inputs, (inputs @ truth).argmax(-1))
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local:
    for batch, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"loss {mean.item():.6f}")
sys.stdout.flush()
