# ruff: noqa: D102
"""What drawn trainings in frameworks and layouts share: the choices, rows, a model, its faults."""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent / "healthy"))

from common import VOCABULARY, sentences

STEPS = 40
FAULT_AT = 4
Choices = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Job:
    """What was drawn.

    Attributes:
        kind: The framework or layout.
        worlds: How many ranks each launch has; two if the training is resumed.
        given: The other choices, by name.
    """

    kind: str
    worlds: tuple[int, ...]
    given: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name == "given" or name not in self.given:  # a copy has nothing yet
            raise AttributeError(name)
        return self.given[name]

    @property
    def words(self) -> str:
        named = ", ".join(f"{name} {value}" for name, value in self.given.items())
        return f"{self.kind} on {self.worlds}: {named}"


@dataclass(frozen=True)
class Launch:
    """The words of a launch: a job, its fault, which launch it is, and where it saves."""

    job: Job
    fault: str
    number: int
    folder: Path

    @property
    def is_last(self) -> bool:
        return self.number == len(self.job.worlds) - 1

    @property
    def steps(self) -> tuple[int, int]:
        """The first step of this launch, and its end."""
        of_each = STEPS // len(self.job.worlds)
        return self.number * of_each, (self.number + 1) * of_each


def draw_from(choices: Choices, source: random.Random) -> dict[str, Any]:
    return {name: source.choice(values) for name, values in choices.items()}


def launch(draw: Callable[[int], Job]) -> Launch:
    """Read the words of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--fault", default="")
    parser.add_argument("--launch", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("saved"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    return Launch(draw(chosen.seed), chosen.fault, chosen.launch, chosen.folder)


class Rows(Dataset[Any]):
    """Rows of tokens, some shorter than others if ``uneven``; as dictionaries or as tensors."""

    def __init__(self, count: int = 640, *, uneven: bool, named: bool, seed: int = 1) -> None:
        self.rows, self.named = sentences(count, 20, seed), named
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(8, 21, (count,), generator=draw)
        if not uneven:
            self.lengths.fill_(20)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        row = self.rows[at][: self.lengths[at]]
        if self.named:
            return {"input_ids": row.tolist(), "length": len(row)}
        return F.pad(row, (0, 20 - len(row)), value=-100)


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor(
        [row["input_ids"] + [-1] * (longest - len(row["input_ids"])) for row in rows]
    )
    mask = ids >= 0
    given = {"input_ids": ids.clamp(min=0), "attention_mask": mask.long()}
    return {**given, "labels": ids.masked_fill(~mask, -100)}


class Attention(nn.Module):
    """Causal attention, of which a rank may have some of the heads."""

    def __init__(self, width: int, of_head: int = 8) -> None:
        super().__init__()
        self.of_head = of_head
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            part(hidden).view(batch, length, -1, self.of_head).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a transformer, before its norms."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width)
        self.second, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.down, self.dropout = nn.Linear(3 * width, width), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.first(hidden)))
        wide = F.gelu(self.up(self.second(hidden)))
        return hidden + self.dropout(self.down(wide))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Predict the next token; what is after a row's end is no token."""

    def __init__(self, *, dropout: float = 0.0, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens.clamp(min=0))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def token_loss(logits: Tensor, tokens: Tensor, **more: Any) -> Tensor:
    flat = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(flat, tokens[:, 1:].flatten(), **more)


class Odd:
    """What is wrong on rank 1, or with the data of all."""

    def __init__(self, fault: str, rank: int) -> None:
        self.fault, self.is_odd = fault, rank == 1

    def labels(self, labels: Tensor) -> Tensor:
        if self.fault == "labels" and self.is_odd:
            return labels.roll(1, 0)
        return labels

    @property
    def factor(self) -> float:
        return 4.0 if self.fault == "loss" and self.is_odd else 1.0

    @torch.no_grad()
    def at_step(self, step: int, model: nn.Module, optimizer: Any) -> None:
        if not self.is_odd or step != FAULT_AT:
            return
        if self.fault == "weight":
            last: Any = list(model.parameters())[-1]
            local = last.to_local() if isinstance(last, DTensor) else last
            local.flatten()[:1].add_(0.1)
        if self.fault == "rate":
            optimizer.param_groups[0]["lr"] *= 1.5
        if self.fault == "dropout off":
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
