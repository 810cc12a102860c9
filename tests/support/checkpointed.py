"""A small language model under activation checkpointing of every kind."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class CheckpointedLM(nn.Module):
    """Two blocks in checkpoints: if "shared", the second twice; if "everything", in one more."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.times = 2 if "shared" in kind else 1
        self.embedding = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.Dropout(0.1), nn.ReLU(), nn.Linear(40, 24))
            for _ in range(2)
        )
        self.head = nn.Linear(24, 50)

    def forward(self, input_ids, labels):
        if not self.kind.startswith("everything"):
            return {"loss": self._loss(input_ids, labels)}
        one = torch.ones((), requires_grad=True)
        loss = checkpoint(self._loss, input_ids, labels, one, use_reentrant=True)
        return {"loss": loss}

    def _loss(self, input_ids, labels, one=1.0):
        hidden = self.embedding(input_ids) * one
        for block in (self.blocks[0], *[self.blocks[1]] * self.times):
            hidden = hidden + self._call(block, hidden)
        logits = self.head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100)

    def _call(self, block, hidden):
        if not self.kind.endswith("reentrant") or self.kind.startswith("everything"):
            return block(hidden)
        reentrant = "non-reentrant" not in self.kind
        return checkpoint(block, hidden, use_reentrant=reentrant)


def wrapped_in_checkpoints(model):
    """Wrap each block as torch's own tools do, which changes the parameters' names."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return model
