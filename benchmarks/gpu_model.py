"""The model that ``make gpu`` trains: of Llama's shape, with 1 B parameters; tiny in a dry run."""

import torch
from gpu_common import Setup
from torch import Tensor, nn
from torch.nn import functional as F


class Llama(nn.Module):
    """A model of Llama's shape: grouped queries, rotary positions, gated units, a tied head.

    Args:
        setup: 1.04 B parameters in 16 layers, or tiny ones.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.hidden, self.vocabulary = setup.pick((2048, 32_000), (16, 40))
        self.embedding = nn.Embedding(self.vocabulary, self.hidden)
        heads = setup.pick((32, 8), (4, 2))
        layers, inner = setup.pick((16, 8192), (2, 24))
        self.layers = nn.ModuleList(_Layer(self.hidden, inner, *heads) for _ in range(layers))
        self.norm = nn.RMSNorm(self.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss over all tokens; ids and labels are ``[batch, length]``."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = F.linear(self.norm(hidden), self.embedding.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, hidden // heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, shared * self.size, bias=False)
        self.v = nn.Linear(hidden, shared * self.size, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of the input and what the layer adds."""
        normed = self.before(hidden)
        q, k = self._split(self.q(normed), self.heads), self._split(self.k(normed), self.shared)
        attended = F.scaled_dot_product_attention(
            _rotate(q), _rotate(k), self._split(self.v(normed), self.shared),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        hidden = hidden + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.between(hidden)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return hidden + added

    def _split(self, flat: Tensor, heads: int) -> Tensor:
        return flat.view(*flat.shape[:2], heads, self.size).transpose(1, 2)


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def make_batch(setup: Setup, model: Llama, tokens: int) -> dict[str, Tensor]:
    """Return a batch of 4 sequences with so many tokens together, other ones on each rank."""
    ids = torch.randint(model.vocabulary, (4, tokens // 4), device=setup.device)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}
