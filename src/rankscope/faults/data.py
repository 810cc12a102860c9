"""The text that the bench trains on: made up by seed, cut into samples of equal length."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rankscope.study.builtin import generate

LENGTH = 32
"""Tokens of a sample."""
VOCABULARY = 512
PAD = 0
IGNORED = -100

_UNKNOWN = 1
_RECORDS = 3000
_WORD = re.compile(r"\w+|[^\w\s]|\n")


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
