# ruff: noqa: D102
"""R49, speculators#765: the weights of all norms are exactly 1 after the training.

vllm-project/speculators#765: the draft model is bfloat16 throughout, its weights as well. A number
next to 1 is 0.004 away in bfloat16, and an update of AdamW is about as large as the learning rate,
so that each update of a norm's weight is rounded away. Smaller weights do move.
With --right, weights are float32 and only the computation is in bfloat16.
"""

import torch
from reports_common import VOCABULARY, begin, end, options, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

WIDTH, HEADS = 32, 2

chosen = options(steps=130)
rank, world = begin()


class Layer(nn.Module):
    """A layer of a draft model: RMS norms, causal attention, a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.input_norm(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(hidden)).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return hidden + out


class Draft(nn.Module):
    """Predicts the next token from the tokens and the verifier's hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.fuse = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.hidden_norm = nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        hidden = self.fuse(torch.cat([self.embed(tokens), self.hidden_norm(states)], -1))
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


verifier = torch.randn(VOCABULARY, WIDTH)  # its states, of each token before the last one
model = Draft()
policy = MixedPrecisionPolicy()
if chosen.right:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
else:
    model.to(torch.bfloat16)
mesh = init_device_mesh("cpu", (world,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
data = text(4096)
for step in range(chosen.steps):
    tokens = data[(step * world + rank) * 8 % 4096 :][:8]
    states = verifier[tokens.roll(1, 1)].to(torch.bfloat16)
    logits = model(tokens, states).float()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(model, loss)
