# ruff: noqa: D102
"""Lightning: learned weights of two tasks, mixtures across ranks, a backbone that rests."""

import os
from typing import Any

import lightning
import torch
from common import History, begin, end, pictures
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS, REST = 100, 30


class Tasks(lightning.LightningModule):  # type: ignore[misc]
    """A backbone, a head for the class, a head for the brightness, and what each is worth."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.SiLU(), nn.AvgPool2d(2)
        )
        self.classes, self.brightness = nn.Linear(192, 10), nn.Linear(192, 1)
        self.doubt = nn.Parameter(torch.zeros(2))
        self.history = history

    def training_step(self, batch: list[Tensor], at: int) -> Tensor:
        seen, labels = batch
        share = 0.7 + 0.3 * torch.rand(()).item()
        both = self.all_gather(seen).flip(0)[self.global_rank]  # the other's pictures
        others = self.all_gather(labels).flip(0)[self.global_rank]
        mixed = share * seen + (1 - share) * both
        hidden = self.backbone(mixed).flatten(1)
        logits = self.classes(hidden)
        first = share * F.cross_entropy(logits, labels)
        first = first + (1 - share) * F.cross_entropy(logits, others)
        second = F.mse_loss(self.brightness(hidden)[:, 0], 10 * mixed.mean((1, 2, 3)))
        weighed = torch.stack([first, second]) * torch.exp(-self.doubt)
        loss = (weighed + self.doubt).sum()
        self.history.note(first + second)
        return loss

    def validation_step(self, batch: list[Tensor], at: int) -> None:
        seen, labels = batch
        right = self.classes(self.backbone(seen).flatten(1)).argmax(1) == labels
        self.log("right", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        heads = [*self.classes.parameters(), *self.brightness.parameters()]
        groups = [
            {"params": self.backbone.parameters(), "lr": 5e-3},
            {"params": heads, "lr": 3e-3},
            {"params": [self.doubt], "lr": 2e-2, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.05)

        def rested(step: int) -> float:
            return float(step >= REST)

        def falling(step: int) -> float:
            return 1 - 0.5 * step / STEPS

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [rested, falling, falling])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main() -> None:
    lightning.seed_everything(5, verbose=False)
    data = TensorDataset(*pictures(1600))
    held_out = TensorDataset(*(part[:64] for part in pictures(1664)))
    history = History()
    module = Tasks(history)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(
        module,
        DataLoader(data, batch_size=32, shuffle=True),
        DataLoader(held_out, batch_size=32),
    )
    begin()
    end(history, module)


if __name__ == "__main__":
    main()
