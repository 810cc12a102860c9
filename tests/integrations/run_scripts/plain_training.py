"""A neighbour of the scripts: their training, which knows nothing of rankscope."""

import hashlib

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
MICRO = 2
SCALE = 1024.0


class Net(nn.Module):
    """A small classifier in two blocks; its output has no ``.loss``."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(12, 24), nn.Linear(24, 24)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        for block in self.blocks:
            x = self.dropout(block(x).relu())
        return self.head(x)


def build(kind):
    torch.manual_seed(0)
    net = Net()
    if kind == "ddp":
        model = DistributedDataParallel(net)
    else:
        for block in net.blocks:
            fully_shard(block)
        model = fully_shard(net)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rank, number):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 12, generator=generator), torch.randint(5, (4,), generator=generator)


def train(rank, model, optimizer, see=lambda loss: None):
    """Train with micro-batches and a scaled loss; ``see`` is where a scope may be told the loss."""
    torch.manual_seed(rank)
    scale = torch.tensor(SCALE)
    for step in range(STEPS):
        for micro in range(MICRO):
            x, y = batch(rank, MICRO * step + micro)
            last = micro == MICRO - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            else:
                model.require_backward_grad_sync = last
            loss = F.cross_entropy(model(x), y)
            see(loss)
            (scale * (loss / MICRO)).backward()
        for parameter in model.parameters():
            parameter.grad /= SCALE
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model(batch(rank, 0)[0])


def digest(model):
    own = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        own.update(local.detach().numpy().tobytes())
    return own.hexdigest()
