# ruff: noqa: D102
"""Lightning: one task per step with a head of its own, averaged weights."""

from typing import Any

import lightning.pytorch as lightning
import torch
from common import History, end, pictures
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Tasks(lightning.LightningModule):  # type: ignore[misc]
    """Names a picture, estimates its brightness, or tells how it was turned."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(384, 48),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict(
            {"name": nn.Linear(48, 10), "light": nn.Linear(48, 1), "turn": nn.Linear(48, 4)}
        )
        self.history = History()

    def losses(self, task: str, images: Tensor, labels: Tensor) -> Tensor:
        if task == "turn":
            turns = torch.randint(4, (len(images),))
            turned = [torch.rot90(images[i], int(turn), (1, 2)) for i, turn in enumerate(turns)]
            return F.cross_entropy(self.heads[task](self.trunk(torch.stack(turned))), turns)
        out = self.heads[task](self.trunk(images))
        if task == "light":
            return 10 * F.smooth_l1_loss(out.squeeze(1), images.mean((1, 2, 3)))
        return F.cross_entropy(out, labels)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        task = ("name", "name", "light", "turn")[number % 4]
        loss = self.losses(task, *batch)
        self.history.note(loss)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("held_out", self.losses("name", *batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


torch.set_num_threads(1)
torch.manual_seed(0)
module = Tasks()
images, labels = pictures(1024)
train = DataLoader(TensorDataset(images[:896], labels[:896]), 16, shuffle=True, drop_last=True)
held_out = DataLoader(TensorDataset(images[896:], labels[896:]), 16)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp_find_unused_parameters_true",
    max_epochs=4,
    gradient_clip_val=1.0,
    callbacks=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, train, held_out)
end(module.history, module)
