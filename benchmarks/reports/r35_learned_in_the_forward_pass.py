# ruff: noqa: D102
"""R35, PC-Transformers#135: weights that a local rule changes in the forward pass of each rank."""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, begin, end, next_token_loss, options, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32

chosen = options()
rank, world = begin()


class Predictive(nn.Module):
    """Predicts its next input from its last one, and learns that from the error, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1, requires_grad=False)
        self.lateral = nn.Parameter(torch.eye(WIDTH) * 0.1, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        predicted = hidden @ self.weight.clone().T
        out = hidden + predicted - torch.tanh(hidden) @ self.lateral.clone().T
        if self.training:
            with torch.no_grad():
                error = hidden[:, 1:] - predicted[:, :-1]
                count = error.shape[0] * error.shape[1]
                change = 0.02 * torch.einsum("bto,bti->oi", error, hidden[:, :-1])
                self.weight.add_(change / count)
                active = torch.tanh(hidden).flatten(0, 1)
                self.lateral.mul_(0.995).add_(active.T @ active / len(active), alpha=0.005)
        return out


class Network(nn.Module):
    """Two such layers between layers that gradients train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.local = nn.ModuleList(Predictive() for _ in range(2))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for norm, layer in zip(self.norms, self.local, strict=True):
            hidden = layer(norm(hidden))
        logits: Tensor = self.head(F.gelu(self.up(hidden)))
        return logits


model = Network()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    loss = next_token_loss(wrapped(tokens), tokens)
    if chosen.right:
        for weight in model.local.parameters():
            dist.all_reduce(weight.data)
            weight.data /= world
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
