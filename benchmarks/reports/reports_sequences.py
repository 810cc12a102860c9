# ruff: noqa: D102
"""Attention over sequences of which each rank of a group has a part; of r82 to r94."""

from typing import Any

import torch
from reports_common import gather
from torch import Tensor, nn
from torch.nn import functional as F


class PartAttention(nn.Module):
    """The queries of a part look at the keys of all parts that a mask allows."""

    def __init__(self, width: int, heads: int, group: Any) -> None:
        super().__init__()
        self.heads, self.group = heads, group
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.group is not None:
            key, value = gather(torch.cat([key, value], -1), 1, self.group).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + out
