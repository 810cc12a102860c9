"""A Lightning training, watched with one line, marked by an arrow.

Lightning starts the two workers itself; torchrun works as well:

    python examples/lightning_one_line.py
    rankscope report runs/lightning

With a fault that Lightning does not see: it no longer makes samplers, and nobody else does, so
that every worker trains on the same data.

    python examples/lightning_one_line.py --forget-sampler --run-dir runs/lightning-fault
    rankscope report runs/lightning-fault
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rankscope.integrations.lightning import RankscopeCallback

VOCABULARY = 64


class Module(LightningModule):
    """A small recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.body = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over a batch's tokens."""
        [tokens] = batch
        hidden, _ = self.body(self.embedding(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def sequences(size: int = 2048, length: int = 24) -> Tensor:
    """Return sequences ``[size, length]`` that count up by a hidden stride, with noise."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (size, 1), generator=generator)
    strides = torch.randint(1, 8, (size, 1), generator=generator)
    hit = torch.rand(size, length, generator=generator) < 0.2
    noise = hit * torch.randint(VOCABULARY, (size, length), generator=generator)
    return (starts + strides * torch.arange(length) + noise) % VOCABULARY


def main() -> None:
    """Train a little."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/lightning")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--forget-sampler", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    order = torch.Generator().manual_seed(0)
    dataset = TensorDataset(sequences())
    loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=order)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=options.steps,
        callbacks=[
            RankscopeCallback(  # <- the one line
                run_dir=options.run_dir, weight=lambda batch: batch[0][:, 1:].numel()
            ),
        ],
        use_distributed_sampler=not options.forget_sampler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    main()
