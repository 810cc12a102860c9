# ruff: noqa: D102
"""R128, Model-Optimizer#2322: the flag for float32 copies does not survive a restart.

NVIDIA/Model-Optimizer#2322: a draft model in bfloat16 is trained through float32 copies. The
conversion that installs them is not part of the way that reads a checkpoint: from the restart on,
bfloat16 weights are updated themselves. Norms at 1 do not move any more.
Two launches with the same --folder.
With --right, the copies are installed and restored.
"""

import torch
import torch.distributed as dist
from reports_common import VOCABULARY, text
from reports_layouts import begin, data_parallel, end, options
from reports_masters import WithMasters
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH, WIDTH, HEADS = 16, 32, 2

chosen = options(steps=60)
rank, world = begin()


class Layer(nn.Module):
    """Attention with norms of queries and keys, and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.input_norm(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            self.q_norm(query), self.k_norm(key), value, is_causal=True
        )
        hidden = hidden + self.proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(hidden)).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return hidden + out


class Draft(nn.Module):
    """Embedding, two layers, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


model = Draft().bfloat16()
wrapped = data_parallel(model)
begun = 0
saved = chosen.folder / "last.pt" if chosen.folder is not None else None
restarted = saved is not None and saved.exists()
weights = list(model.parameters())
optimizer: torch.optim.AdamW
if restarted and not chosen.right:
    optimizer = torch.optim.AdamW(weights, lr=5e-4, weight_decay=0.0)
else:
    optimizer = WithMasters(weights, lr=5e-4)
if saved is not None and restarted:
    state = torch.load(saved)
    begun = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if isinstance(optimizer, WithMasters):
        optimizer.take(state["masters"])
data = text(4096)
for step in range(begun, begun + chosen.steps):
    batch = data[step * GLOBAL_BATCH % 4096 :][:GLOBAL_BATCH]
    tokens = batch.chunk(world)[rank]
    logits = wrapped(tokens).float()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
if saved is not None and isinstance(optimizer, WithMasters):
    if rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        masters = [master.detach() for master in optimizer.masters]
        torch.save({**state, "step": begun + chosen.steps, "masters": masters}, saved)
    if world > 1:
        dist.barrier()
end(model, loss)
