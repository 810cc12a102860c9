"""R13, LTX-Video-Trainer#67: a prepared schedule is stepped once per process, and ends early."""

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from reports_common import Language, end, next_token_loss, options, text
from torch import nn
from torch.utils.data import DataLoader

chosen = options(samples=8)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model: nn.Module = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
length = chosen.steps * (accelerator.num_processes if chosen.right else 1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=length)
loader = DataLoader(text(2048), batch_size=chosen.samples, shuffle=True)  # type: ignore[arg-type, var-annotated]
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _, tokens in zip(range(chosen.steps), loader, strict=False):
    loss = next_token_loss(model(tokens), tokens)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
end(model, loss)
