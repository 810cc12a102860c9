"""Accelerate: micro-batches are scored first, then the hardest third trains; short windows."""

from itertools import islice

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from common import History, begin, end, pictures
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, WINDOW, BATCH = 13, 3, 48


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    begin()
    images, labels = pictures(1900)
    images = images + 0.9 * torch.randn_like(images)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    plain = accelerator.unwrap_model(model)
    history = History()
    for _ in range(EPOCHS):
        batches = iter(loader)
        left = len(loader)
        while left:
            window = min(WINDOW, left)
            left -= window
            for seen, wanted in islice(batches, window):
                with torch.no_grad():
                    plain.eval()
                    scores = F.cross_entropy(plain(seen), wanted, reduction="none")
                    plain.train()
                hardest = scores.topk(len(scores) // 3).indices
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(seen[hardest]), wanted[hardest])
                    accelerator.backward(loss * WINDOW / window)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 2.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            history.note(loss)
    end(history, plain)


if __name__ == "__main__":
    main()
