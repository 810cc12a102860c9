"""An ordinary Lightning script on two ranks.

It validates before the training and after each of two epochs. It writes its losses down, and a
digest of the model at the end of each epoch, before the validation.
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from plain_training import Net, batch, digest
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

STEPS = 4
MICRO = 2


class Batches(Dataset):
    """Batches by rank and number; a sampler of the trainer's own would mix them."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return STEPS * MICRO

    def __getitem__(self, index):
        return batch(self.rank, index)


class Module(lightning.LightningModule):
    """A module as Lightning's own examples show it: its training step returns the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.losses, self.digests = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("validation loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(Batches(self.trainer.global_rank), batch_size=None)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:  # a loader that begins anew has drawn a number
            torch.manual_seed(self.trainer.global_rank)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == STEPS * MICRO - 1:
            self.digests.append(digest(self))


def fit():
    """Train on two ranks and return the module."""
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=MICRO,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, val_dataloaders=DataLoader(Batches(2), batch_size=None))
    return module


if __name__ == "__main__":
    torch.set_num_threads(1)
    module = fit()
    told = {"losses": module.losses, "digests": module.digests}
    Path(f"{sys.argv[1]}.{module.global_rank}").write_text(json.dumps(told))
