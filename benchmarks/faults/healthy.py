"""Healthy look-alikes (H): ordinary jobs that look as if something were wrong."""

import itertools
import random
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .data_faults import PaddedEpoch
from .job import Job, injects
from .model import IGNORED, LENGTH, PAD, VOCABULARY, WIDTH, Batch, BenchCausalLM


@injects("H1")
class LongTail(Job):
    ragged = True


@injects("H2")
class BatchOfOne(Job):
    batch_size = 1


@injects("H3")
class GroupedByLength(Job):
    ragged = True

    def draw(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            indices = sorted(self.indices(epoch), key=self.length_of)
            batches = [indices[n : n + 4] for n in range(0, len(indices), 4)]
            random.Random(self.seed + epoch).shuffle(batches)
            yield from batches


@injects("H4")
class ShortLastBatch(Job):
    def draw(self) -> Iterator[list[int]]:
        steps = len(self.indices(0)) // self.batch_size
        for number, indices in enumerate(super().draw(), start=1):
            last = number % steps == 0 and self.rank == self.num_workers - 1
            yield indices[:1] if last else indices


@injects("H5")
class TwoDomains(Job):
    """Half of the workers have one kind of data, the others another."""

    def indices(self, epoch: int) -> list[int]:
        by_kind = self.samples.float().mean(1).argsort().tolist()
        half, second = self.num_samples // 2, self.rank >= self.num_workers // 2
        kind = by_kind[half:] if second else by_kind[:half]
        shuffled = random.Random(self.seed + epoch).sample(kind, half)
        return shuffled[self.rank % (self.num_workers // 2) :: self.num_workers // 2]


class Experts(nn.Module):
    """Routes each token to one of eight experts, and keeps a loss that balances them."""

    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, hidden: Tensor) -> Tensor:
        chances = self.router(hidden).softmax(-1)
        chosen = torch.zeros_like(chances).scatter(-1, chances.argmax(-1, keepdim=True), 1.0)
        gates = (chances * chosen).unbind(-1)
        self.balance = (chances.mean((0, 1)) * chosen.mean((0, 1))).sum() * 8
        mixed = [
            g[..., None] * expert(hidden) for g, expert in zip(gates, self.experts, strict=True)
        ]
        return torch.stack(mixed).sum(0)


class MixtureLM(BenchCausalLM):
    """A language model with experts in its last block."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.experts = Experts()
        self.blocks[-1].mlp = self.experts

    def forward(self, *args: Any, **named: Any) -> dict[str, Any]:
        output = super().forward(*args, **named)
        return {**output, "loss": output["loss"] + 0.01 * self.experts.balance}


@injects("H6")
class Mixture(Job):
    def build_model(self) -> nn.Module:
        return MixtureLM(self.dropout)


@injects("H7")
class Curriculum(Job):
    ragged = True

    def scheduled_rate(self, step: int) -> float:
        return self.peak_rate * min(1.0, (step + 1) / 30)

    def length_of(self, index: int) -> int:
        longest = 12 + (LENGTH - 12) * self.step // self.trial.num_steps
        return min(super().length_of(index), longest)

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if self.step % 100 < 97:
            return batch
        noise = torch.randint(2, VOCABULARY, batch.input_ids.shape)  # a loss spike, on all workers
        return Batch(
            noise.where(batch.input_ids != PAD, PAD),
            noise.where(batch.labels >= 0, batch.labels),
            batch.attention_mask,
        )


@injects("H8")
class NearConvergence(Job):
    peak_rate = 3e-3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.use_samples(4 * self.batch_size * self.num_workers)


@injects("H9")
class PaddingDuplicates(PaddedEpoch):
    num_samples = 470


@injects("H10")
class SomewhatSlower(Job):
    def before_step(self) -> None:
        if self.rank == self.trial.worker:
            time.sleep(0.005)


@injects("H11")
class OneSeedEverywhere(Job):
    def random_seed(self) -> int:
        return self.seed


@injects("H12")
class OwnFewBatches(Job):
    def indices(self, epoch: int) -> list[int]:
        first = self.rank * 4 * self.batch_size
        return list(range(first, first + 4 * self.batch_size))


@injects("H13")
class EpochEndsInFewerMicroBatches(Job):
    accumulation = 4
    batch_size = 2
    steps_of_an_epoch: ClassVar[int] = 12

    def train_step(self, batches: Iterator[Batch]) -> None:
        last = self.step % self.steps_of_an_epoch == self.steps_of_an_epoch - 1
        self.accumulation = 3 if last and self.rank else 4
        super().train_step(batches)
        if self.accumulation == 3:
            next(batches)  # all ranks begin the next epoch together


@injects("H14")
class DynamicPadding(Job):
    ragged = True

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        longest = max(map(self.length_of, indices))
        assert batch.attention_mask is not None
        return Batch(
            batch.input_ids[:, :longest],
            batch.labels[:, :longest],
            batch.attention_mask[:, :longest],
        )


@injects("H15")
class ShortEpochs(Job):
    """With one sample a batch, a rank often meets a batch of the epoch before."""

    batch_size = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.use_samples(12 * self.num_workers)


@injects("H16")
class MicroBatchesByTokens(Job):
    ragged = True
    batch_size = 1
    most_tokens: ClassVar[int] = 48

    def train_step(self, batches: Iterator[Batch]) -> None:
        micro: list[list[int]] = []
        drawn = list(itertools.islice(self.numbers, 8))
        for index in drawn:
            if micro and sum(map(self.length_of, [*micro[-1], index])) <= self.most_tokens:
                micro[-1].append(index)
            else:
                micro.append([index])
        self.accumulation = len(micro)
        super().train_step(map(self.collate, micro))

    @cached_property
    def numbers(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.draw())


class NothingToLearn(BenchCausalLM):
    """A model whose loss is 0 where no label counts."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        output = super().forward(*args, **kwargs)
        loss = output["loss"]
        return {**output, "loss": loss if loss.isfinite() else 0.0 * output["logits"].sum()}


@injects("H33")
class BatchesThatKeepStep(Job):
    def build_model(self) -> nn.Module:
        return NothingToLearn(self.dropout)

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if self.rank != self.num_workers - 1 or self.step % 10 != 9:
            return batch
        nothing = torch.zeros_like(batch.input_ids)
        return Batch(nothing, torch.full_like(nothing, IGNORED))
