"""Faults of data (D) and of the loss's scale (S)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from .job import Job, Trial, injects
from .model import IGNORED, VOCABULARY, WIDTH, Batch, BenchCausalLM

ALTERED = 0.15
"""Share of tokens that an augmentation replaces."""


@injects("D1")
class SamplerSeedDiffers(Job):
    from_the_start = True

    def sampler(self, **options: Any) -> Any:
        return super().sampler(seed=self.seed + 1000 * self.rank)


@injects("D2")
class ShuffledBeforeSampler(Job):
    from_the_start = True

    def indices(self, epoch: int) -> list[int]:
        shuffled = np.random.default_rng([epoch, self.rank]).permutation(self.num_samples)
        return [int(shuffled[position]) for position in super().indices(epoch)]


@injects("D4")
class SetEpochForgotten(Job):
    from_the_start = True

    def indices(self, epoch: int) -> list[int]:
        return list(self.sampler())


class NoSampler(Job):
    """Every rank draws from the whole data."""

    from_the_start = True

    def indices(self, epoch: int) -> list[int]:
        order = np.random.default_rng([epoch, self.order_seed()]).permutation(self.num_samples)
        return [int(index) for index in order]

    def order_seed(self) -> int:
        return self.seed


@injects("D5")
class NoSamplerSameSeed(NoSampler):
    pass


@injects("D6")
class NoSamplerOwnSeed(NoSampler):
    def order_seed(self) -> int:
        return self.seed + 1 + self.rank


@injects("D7")
class IterableNotSplit(Job):
    from_the_start = True

    def indices(self, epoch: int) -> list[int]:
        return list(range(self.num_samples))


@injects("D8")
class StreamNotSplitByNode(Job):
    from_the_start = True
    num_shards = 24

    def indices(self, epoch: int) -> list[int]:
        shards = np.array_split(np.arange(self.num_samples), self.num_shards)
        order = np.random.default_rng([epoch, self.seed]).permutation(self.num_shards)
        return [int(index) for shard in order for index in shards[shard]]


@injects("D9")
class EveryProcessIsRankZero(Job):
    from_the_start = True

    def sampler(self, **options: Any) -> Any:
        return super().sampler(rank=0)


@injects("D11")
class PaddedEpoch(Job):
    from_the_start = True
    num_samples = 958  # the sampler repeats some to give every worker as many

    @classmethod
    def begin(cls, trial: Trial) -> int:
        steps_of_an_epoch = -(-cls.num_samples // trial.num_workers) // cls.batch_size
        return min(steps_of_an_epoch, trial.num_steps) - 1


class Augmented(Job):
    """Some tokens of every sample are replaced at random; the labels stay."""

    from_the_start = True

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        noise = torch.randint(2, VOCABULARY, batch.input_ids.shape)
        altered = torch.rand(batch.input_ids.shape) < ALTERED
        return replace(batch, input_ids=noise.where(altered, batch.input_ids))


@injects("D13")
class LoaderWorkersSeededAlike(Job):
    from_the_start = True

    @cached_property
    def loader(self) -> DataLoader[Any]:
        return DataLoader(
            AugmentingDataset(self.samples),
            batch_sampler=itertools.islice(self.draw(), self.trial.num_steps + 1),
            num_workers=1,
            worker_init_fn=seed_numpy_alike,
            multiprocessing_context="fork",
        )

    def options(self) -> dict[str, Any]:
        return {"loader": self.loader}

    def batches(self) -> Iterator[Batch]:
        for tokens, labels in self.loader:
            yield Batch(tokens, labels)


class AugmentingDataset(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples whose tokens are replaced at random, by numpy, as they are read."""

    def __init__(self, samples: Tensor) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.samples[index]
        altered = torch.from_numpy(np.random.random(len(tokens)) < ALTERED)  # noqa: NPY002
        return torch.randint(2, VOCABULARY, tokens.shape).where(altered, tokens), tokens


def seed_numpy_alike(worker: int) -> None:
    """Seed numpy in a loader worker, the same in each."""
    np.random.seed(0)  # noqa: NPY002


@injects("D14")
class AugmentedAlike(Augmented):
    def random_seed(self) -> int:
        return self.seed


@injects("D15")
class SeedNeverReachesSampler(Job):
    from_the_start = True

    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        self.loader: DataLoader[Batch] = DataLoader(
            range(self.num_samples),  # type: ignore[arg-type]
            self.batch_size,
            sampler=self.sampler(seed=0),  # whatever the user has configured
            collate_fn=self.collate,
        )

    def plan(self) -> Mapping[str, Any]:
        return {"seed": self.seed + 42}

    def options(self) -> dict[str, Any]:
        return {**super().options(), "loader": self.loader}

    def batches(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from self.loader


@injects("D16")
class ResumedInAnotherOrder(Job):
    from_the_start = True
    num_samples = 3000  # with 8 workers too, the first session ends inside the first epoch
    num_sessions = 2

    @classmethod
    def begin(cls, trial: Trial) -> int:
        return trial.num_steps // cls.num_sessions

    def indices(self, epoch: int) -> list[int]:
        order = list(self.sampler(seed=self.seed + self.session))
        consumed = self.steps_of(self.session).start * self.batch_size
        return order[consumed:] if epoch == 0 else super().indices(epoch)


@injects("D17")
class FillerTokenOnly(Job):
    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if self.hit:
            batch.labels[:, :-1] = IGNORED
            batch.labels[1:] = IGNORED
        return batch

    def factors(self, batches: list[Batch]) -> list[float]:
        return [1.0 for _ in batches]


@injects("D19")
class TokenizerDiffers(Job):
    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if not self.hit:
            return batch
        other = np.random.default_rng(self.seed).permutation(VOCABULARY)
        tokens = torch.from_numpy(other)[batch.input_ids]
        return Batch(tokens, tokens.clone())


@injects("D20")
class RandomLabels(Job):
    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if self.hit:
            wrong = torch.rand(batch.labels.shape) < 0.3
            batch.labels[wrong] = torch.randint(2, VOCABULARY, (int(wrong.sum()),))
        return batch


@injects("D21")
class PaddingCounts(Job):
    ragged = True

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        return replace(batch, labels=batch.input_ids.clone()) if self.hit else batch


@injects("D22")
class ThreeOfFourMicroBatches(Job):
    accumulation = 4
    batch_size = 2

    def train_step(self, batches: Iterator[Batch]) -> None:
        self.accumulation = 3 if self.hit else 4
        super().train_step(batches)


class SameBatches(Job):
    """One rank meets few batches of its own again and again."""

    num_batches: ClassVar[int]

    def draw(self) -> Iterator[list[int]]:
        kept: list[list[int]] = []
        for indices in super().draw():
            if not self.hit:
                yield indices
                continue
            if len(kept) < self.num_batches:
                kept.append(indices)
            yield kept[self.step % len(kept)]


@injects("D23")
class OneBatchForEver(SameBatches):
    num_batches = 1


@injects("D24")
class FourBatchesForEver(SameBatches):
    num_batches = 4


@injects("D27")
class ZerosInsteadOfBatches(Job):
    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        lost = self.hit and self.step % 25 == 0
        return Batch(torch.zeros_like(batch.input_ids), batch.labels) if lost else batch


@injects("D25")
class CutAtAnotherLength(Job):
    longest: ClassVar[int] = 16

    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        if not self.hit:
            return batch
        return Batch(batch.input_ids[:, : self.longest], batch.labels[:, : self.longest])


class OwnGenerator(torch.utils.data.Dataset[Batch]):
    """Batches whose tokens are replaced at random, by a generator of the data set's own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.drawn = job.draw()
        self.noise = torch.Generator().manual_seed(0)  # a local index: 0 on each rank

    def __getitem__(self, index: int) -> Batch:
        batch = self.job.collate(next(self.drawn))
        chances = torch.rand(batch.input_ids.shape, generator=self.noise)
        noise = torch.randint(2, VOCABULARY, batch.input_ids.shape, generator=self.noise)
        return replace(batch, input_ids=noise.where(chances < ALTERED, batch.input_ids))


@injects("D26")
class GeneratorSeededByLocalIndex(Job):
    from_the_start = True

    @cached_property
    def loader(self) -> DataLoader[Any]:
        numbers = range(self.trial.num_steps + 1)
        return DataLoader(OwnGenerator(self), batch_size=None, sampler=numbers)

    def options(self) -> dict[str, Any]:
        return {"loader": self.loader}

    def batches(self) -> Iterator[Batch]:
        return iter(self.loader)


@injects("S1")
class MeanOfMeans(Job):
    from_the_start = True
    ragged = True

    def factors(self, batches: list[Batch]) -> list[float]:
        return [1 / len(batches) for _ in batches]


@injects("S2")
class MeanOfMicroMeans(MeanOfMeans):
    accumulation = 4
    batch_size = 2


@injects("S3")
class LossTimesWorkers(Job):
    def factors(self, batches: list[Batch]) -> list[float]:
        wrong = self.num_workers if self.active else 1
        return [factor * wrong for factor in super().factors(batches)]


@injects("S4")
class DividedTwice(Job):
    def reduce(self, bucket: Tensor) -> Tensor:
        mean = super().reduce(bucket)
        return mean / self.num_workers if self.active else mean


@injects("S5")
class GatheredWithoutGradient(Job):
    from_the_start = True

    def build_model(self) -> nn.Module:
        return ContrastiveLM(self.dropout)


class ContrastiveLM(BenchCausalLM):
    """Adds a contrastive loss between the halves of all workers' samples."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        output = super().forward(input_ids, labels, attention_mask)
        first, second = (self.embedding(half).mean(1) for half in input_ids.chunk(2, dim=1))
        everyone = [torch.empty_like(second) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, second.detach().contiguous())  # no gradient goes through this
        everyone[dist.get_rank()] = second
        similarity = first @ torch.cat(everyone).T / WIDTH**0.5
        own = dist.get_rank() * len(first) + torch.arange(len(first))
        return {**output, "loss": output["loss"] + 0.1 * F.cross_entropy(similarity, own)}


@injects("S6")
class ClippedLocally(Job):
    limit: ClassVar[float] = 0.5

    def reduce(self, bucket: Tensor) -> Tensor:
        if self.active:
            bucket *= min(1.0, self.limit / float(bucket.norm()))
        return super().reduce(bucket)


class RunningNorm(nn.Module):
    """Divides by a running standard deviation, which it keeps in a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(hidden.detach().flatten(0, -2).std(0), 0.01)
        return hidden / self.scale


@injects("S8")
class NormaliserPerRank(Job):
    from_the_start = True
    ddp_options: ClassVar[Mapping[str, Any]] = {"broadcast_buffers": False}

    between = RunningNorm
