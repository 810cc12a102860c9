"""Small models and batches for tests on real ranks."""

import torch
from torch import nn
from torch.nn import functional as F


class TinyLM(nn.Module):
    """Embedding, dropout, a layer with a buffer, an optional unused branch, and a head."""

    def __init__(self, *, dropout=0.1, branch=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(24, 40)
        self.norm = nn.BatchNorm1d(40)
        self.branch = nn.Linear(40, 40) if branch else None
        self.head = nn.Linear(40, 50)

    def forward(self, input_ids, labels, *, use_branch=False):
        hidden = self.hidden(self.dropout(self.embedding(input_ids)))
        hidden = self.norm(hidden.flatten(0, 1)).relu()
        if use_branch:
            hidden = self.branch(hidden)
        loss = F.cross_entropy(self.head(hidden), labels.flatten(), ignore_index=-100)
        return {"loss": loss}


def make_model(seed=0, *, dropout=0.1, branch=False):
    torch.manual_seed(seed)
    return TinyLM(dropout=dropout, branch=branch)


def make_batch(rank, step, *, size=3, length=5):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(50, (size, length), generator=generator)
    labels = torch.randint(50, (size, length), generator=generator)
    labels[:, : 1 + (rank + step) % 3] = -100
    return {"input_ids": ids, "labels": labels}


class PassedOn(torch.autograd.Function):
    """Passes on gradients as DDP does with ``find_unused_parameters``: none where none came."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients
