# ruff: noqa: D102
"""HSDP: a frozen trunk that thaws after forty steps, below experts that every rank has."""

import torch
from common import History, Language, backward, begin, end, next_token_loss, sentences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

STEPS, THAW, BATCH, EXPERTS, WIDTH = 90, 40, 8, 4, 32


class Experts(nn.Module):
    """Each token goes to its best expert; a second loss keeps them equally busy."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden.flatten(0, 1)
        jitter = 0.98 + 0.04 * torch.rand_like(flat) if self.training else 1.0
        shares = self.router(flat * jitter).softmax(-1)
        weight, choice = shares.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(flat[mine]) * weight[mine, None])
        busy = F.one_hot(choice, EXPERTS).float().mean(0)
        return hidden + out.view_as(hidden), EXPERTS * (busy * shares.mean(0)).sum()


class Tuned(nn.Module):
    """A trunk from elsewhere, and a new head with experts."""

    def __init__(self, trunk: Language) -> None:
        super().__init__()
        self.trunk = trunk
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, trunk.head.out_features)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk.embed(tokens) + self.trunk.places(torch.arange(tokens.shape[1]))
        for block in self.trunk.blocks:
            hidden = block(hidden)
        hidden, balance = self.experts(self.trunk.norm(hidden))
        return self.head(hidden), balance

    def thaw(self, on: bool) -> list[nn.Parameter]:
        """Train the trunk or not; its unused head stays frozen."""
        self.trunk.train(on)
        parts = [self.trunk.embed, self.trunk.places, self.trunk.blocks, self.trunk.norm]
        chosen = [parameter for part in parts for parameter in part.parameters()]
        for parameter in chosen:
            parameter.requires_grad_(on)
        return chosen


rank, world = begin()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
model = Tuned(Language(dropout=0.1))
model.trunk.head.requires_grad_(False)
for block in model.trunk.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model.experts, mesh=mesh)
fully_shard(model, mesh=mesh)
model.thaw(False)
fresh = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(fresh, lr=5e-3)
data = sentences(8192)
torch.manual_seed(200 + rank)
history = History()
for step in range(STEPS):
    if step == THAW:
        optimizer.add_param_group({"params": model.thaw(True), "lr": 1e-3})
    first = (step * world + rank) * BATCH % 8192
    tokens = data[first : first + BATCH]
    logits, balance = model(tokens)
    loss = next_token_loss(logits, tokens) + 0.01 * balance
    backward(loss)
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    history.note(loss)
end(history, model)
