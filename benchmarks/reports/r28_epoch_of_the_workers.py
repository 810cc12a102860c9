# ruff: noqa: D102
"""R28, starVLA#470: loader processes that live on never hear of the next epoch."""

import multiprocessing
import os

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from reports_common import Language, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LONG = 160  # samples of an epoch, of 1024

chosen = options(processes=1)


class Mixture(Dataset[Tensor]):
    """An index and the epoch tell which sample is drawn, with replacement."""

    def __init__(self) -> None:
        self.data = text(1024)
        self.mine = 0
        self.shared = multiprocessing.Value("q", 0)

    def __len__(self) -> int:
        return LONG

    def set_epoch(self, epoch: int) -> None:
        self.mine = self.shared.value = epoch

    def __getitem__(self, index: int) -> Tensor:
        epoch = self.shared.value if chosen.right else self.mine
        draw = torch.Generator().manual_seed(epoch * 1_000_003 + index * 7919 + 5)
        return self.data[int(torch.randint(len(self.data), (), generator=draw))]


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model: nn.Module = Language()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
dataset = Mixture()
loader = DataLoader(
    dataset, 8, num_workers=chosen.processes, persistent_workers=chosen.processes > 0
)
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
