"""Lightning: a small recurrent language model; its own sampler takes samples in order."""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--clip", type=float, default=0.05)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--lightnings-sampler", action="store_true", help="which shuffles")
parser.add_argument("--stateful", action="store_true", help="a loader that can be resumed")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--folder", type=Path)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--forget", choices=("", "optimizer"), default="")
chosen = parser.parse_args()
torch.set_num_threads(1)


class Module(LightningModule):
    """Embedding, recurrent layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.body = nn.GRU(32, 64, batch_first=True)
        self.dropout = nn.Dropout(chosen.dropout)
        self.head = nn.Linear(64, 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        [tokens] = batch
        hidden, _ = self.body(self.embedding(tokens[:, :-1]))
        logits = self.head(self.dropout(hidden))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_model(self) -> None:
        if chosen.fsdp:
            mesh = self.device_mesh["data_parallel"]
            for part in (self.embedding, self.body, self.head, self):
                fully_shard(part, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


strategy: ModelParallelStrategy | str = "ddp" if chosen.workers > 1 else "auto"
if chosen.fsdp:
    strategy = ModelParallelStrategy(data_parallel_size=chosen.workers, tensor_parallel_size=1)
tokens = torch.randint(64, (512, 24), generator=torch.Generator().manual_seed(0))
rank = int(os.environ.get("RANK", "0"))
sampler: DistributedSampler[Tensor] = DistributedSampler(
    tokens,  # type: ignore[arg-type]
    chosen.workers,
    rank,
    shuffle=False,
)
own = not chosen.lightnings_sampler
loader = (StatefulDataLoader if chosen.stateful else DataLoader)(
    TensorDataset(tokens), batch_size=chosen.batch, sampler=sampler if own else None
)
torch.manual_seed(0)
module = Module()
torch.manual_seed(1 + rank)
saving = []
if chosen.save_at:
    saving = [ModelCheckpoint(chosen.folder, "saved", every_n_train_steps=chosen.save_at)]
saved = chosen.folder / "saved.ckpt" if chosen.resume else None
if saved is not None and chosen.forget == "optimizer":
    module.load_state_dict(torch.load(saved, weights_only=False)["state_dict"])
    saved = None
Trainer(
    accelerator="cpu",
    devices=chosen.workers,
    strategy=strategy,
    max_steps=20,
    logger=False,
    callbacks=saving,
    enable_checkpointing=bool(saving),
    enable_progress_bar=False,
    accumulate_grad_batches=chosen.accumulate,
    gradient_clip_val=chosen.clip or None,
    precision=chosen.precision,
    use_distributed_sampler=not own,
).fit(module, loader, ckpt_path=saved)
