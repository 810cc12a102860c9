"""R16, accelerate#4199: a loader that is already a rank's part is divided among the ranks again."""

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from reports_common import Language, end, next_token_loss, options, text
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

chosen = options(steps=96, samples=8)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model: nn.Module = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = text(512)  # 32 steps of 2 × 8 samples in an epoch
if chosen.right:
    loader = DataLoader(data, batch_size=chosen.samples, shuffle=True)  # type: ignore[arg-type, var-annotated]
else:
    part: DistributedSampler[torch.Tensor] = DistributedSampler(
        data,  # type: ignore[arg-type]
        num_replicas=accelerator.num_processes,
        rank=accelerator.process_index,
    )
    loader = DataLoader(data, batch_size=chosen.samples, sampler=part)  # type: ignore[arg-type]
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = epoch = 0
while step < chosen.steps:
    loader.set_epoch(epoch)
    for tokens in loader:
        loss = next_token_loss(model(tokens), tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == chosen.steps:
            break
    epoch += 1
accelerator.print(f"{epoch} epochs")
end(model, loss)
