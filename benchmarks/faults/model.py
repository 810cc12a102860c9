"""What the bench trains: a small language model, and text that is made up by seed.

Two transformer blocks, some 170,000 parameters; the text is cut into samples of equal length.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.lab.study.builtin import generate

LENGTH = 32
"""Tokens of a sample."""
VOCABULARY = 512
PAD = 0
IGNORED = -100

_UNKNOWN = 1
_RECORDS = 3000
_WORD = re.compile(r"\w+|[^\w\s]|\n")

WIDTH = 64
NUM_BLOCKS = 2
_NUM_HEADS = 2


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        hidden = hidden + self.dropout(self._attend(self.norm_attention(hidden)))
        changed: Tensor = hidden + self.dropout(self.mlp(self.norm_mlp(hidden)))
        return changed

    def _attend(self, hidden: Tensor) -> Tensor:
        num_samples, length, _ = hidden.shape
        split = self.attention(hidden).view(num_samples, length, 3, _NUM_HEADS, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return mixed


class BenchCausalLM(nn.Module):
    """A causal language model with the interface of Hugging Face's: it returns its own loss.

    Attributes:
        between: Sits between the embedding and the blocks; does nothing. Faults put modules there.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.between: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the mean loss per label token, and the logits ``[B, L, VOCABULARY]``.

        Padding is on the right, where a causal model does not look; so the mask changes nothing.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.between(self.embedding(input_ids) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        return {"loss": loss, "logits": logits}


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as a causal language model of Hugging Face's takes it.

    Attributes:
        input_ids: int64 ``[B, LENGTH]``, padded on the right.
        labels: The same tokens; where they do not count, ``IGNORED``.
        attention_mask: 1 where there is a token, 0 on padding; None without padding.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None

    @property
    def num_labels(self) -> int:
        """Tokens that are predicted; the first of a sample never is."""
        return int((self.labels[:, 1:] != IGNORED).sum())


@lru_cache(maxsize=2)
def load_samples(seed: int) -> Tensor:
    """Return the samples: int64 ``[N, LENGTH]``, windows of one long text, no two alike."""
    words: list[str] = []
    for record in generate(seed, _RECORDS):
        text = f"{record['instruction']} {record['input']}\n{record['output']}\n"
        words += _WORD.findall(text.lower())
    common = [word for word, _ in Counter(words).most_common(VOCABULARY - _UNKNOWN - 1)]
    number = {word: token for token, word in enumerate(common, start=_UNKNOWN + 1)}
    tokens = torch.tensor([number.get(word, _UNKNOWN) for word in words])
    windows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return torch.tensor(list(dict.fromkeys(map(tuple, windows.tolist()))))
