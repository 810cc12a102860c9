"""R05, lerobot#3668: the main process evaluates, and its model stays in evaluation mode."""

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import set_seed  # type: ignore[import-untyped]
from reports_common import Language, end, next_token_loss, options, text
from torch import nn
from torch.utils.data import DataLoader

chosen = options()
accelerator = Accelerator(cpu=True)
set_seed(7, device_specific=True)
torch.manual_seed(0)
model: nn.Module = Language(dropout=0.1)
torch.manual_seed(100 + accelerator.process_index)
held_out = text(32, seed=2)


def evaluate(policy: nn.Module) -> float:
    training = policy.training
    policy.eval()
    with torch.no_grad():
        value = next_token_loss(policy(held_out), held_out).item()
    if chosen.right:
        policy.train(training)
    return value


loader = DataLoader(text(2048), batch_size=8, shuffle=True)  # type: ignore[arg-type, var-annotated]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for step, tokens in zip(range(chosen.steps), loader, strict=False):
    loss = next_token_loss(model(tokens), tokens)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 15 == 0:
        if accelerator.is_main_process:
            print(f"evaluation {evaluate(accelerator.unwrap_model(model)):.4f}")
        accelerator.wait_for_everyone()
end(model, loss)
