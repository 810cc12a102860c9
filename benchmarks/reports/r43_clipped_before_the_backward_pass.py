# ruff: noqa: D102
"""R43, nano-world-model#22: gradients are clipped in training_step, before its backward pass.

simchowitzlabpublic/nano-world-model#22: Lightning calls the backward pass after training_step. So
the gradient of the last micro-batch of an update is never clipped, and what the micro-batches
before it have added up is scaled down in the middle of the accumulation, on each rank by its own.
With --right, the hook of Lightning clips the gradient of the update.
"""

from typing import Any

import lightning
import torch
from reports_common import options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATED, LIMIT, WIDTH = 2, 0.25, 48

chosen = options(steps=120)


class Transition(nn.Module):
    """A residual layer of a model of the next frame."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(self.norm(hidden))
        return hidden + out


class WorldModel(lightning.LightningModule):  # type: ignore[misc]
    """From a frame's latent and an action to the next latent."""

    def __init__(self) -> None:
        super().__init__()
        self.action = nn.Embedding(6, WIDTH)
        self.frame = nn.Linear(20, WIDTH)
        self.layers = nn.Sequential(*(Transition() for _ in range(3)))
        self.out = nn.Linear(WIDTH, 20)

    def forward(self, frame: Tensor, action: Tensor) -> Tensor:
        change: Tensor = self.out(self.layers(self.frame(frame) + self.action(action)))
        return frame + change

    def training_step(self, batch: Any, index: int) -> Tensor:
        frame, action, after = batch
        loss = F.mse_loss(self(frame, action), after)
        if not chosen.right:
            torch.nn.utils.clip_grad_norm_(self.parameters(), LIMIT)
        self.last = loss.detach()
        if index % 40 == 0:
            self.print(f"batch {index}: loss {loss.item():.4f}")
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if chosen.right:
            torch.nn.utils.clip_grad_norm_(self.parameters(), LIMIT)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def recordings(samples: int) -> TensorDataset:
    """Each action turns the latent in its own way; a few frames move much more than others."""
    draw = torch.Generator().manual_seed(5)
    turns = torch.linalg.qr(torch.randn(6, 20, 20, generator=draw))[0]
    sizes = torch.where(torch.rand(samples, 1, generator=draw) < 0.1, 4.0, 1.0)
    frames = sizes * torch.randn(samples, 20, generator=draw)
    actions = torch.randint(6, (samples,), generator=draw)
    after = torch.einsum("nij,nj->ni", turns[actions], frames)
    return TensorDataset(frames, actions, after + 0.05 * torch.randn(samples, 20, generator=draw))


lightning.seed_everything(0, verbose=False)
model = WorldModel()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=chosen.steps,
    accumulate_grad_batches=ACCUMULATED,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(recordings(8192), batch_size=16, shuffle=True))
total = sum(p.detach().double().sum().item() for p in model.parameters())
model.print(f"last loss {model.last.item():.6f}, sum of parameters {total:.17g}")
