"""Data loaders that draw with replacement: recognised, and no fault."""

import numpy as np
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from rankscope import Run
from rankscope.bus.finding import Severity
from rankscope.verdict.diagnosis import diagnose_run
from rankscope.wrappers.facts import draws_with_replacement
from support.loops import Loop
from support.ranks import run_ranks

DATA = list(range(12))
NUM_SHARDS, SHARD, BATCH = 12, 24, 6


class ResampledShards(IterableDataset):
    """Names of shards, drawn with replacement, as webdataset's class of this name does."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        while True:
            yield int(self.rng.integers(NUM_SHARDS))


class Pipeline(IterableDataset):
    """A source and what is done to it, as webdataset's ``DataPipeline`` has it."""

    def __init__(self, *stages) -> None:
        self.pipeline = list(stages)

    def __iter__(self):
        return (shard * SHARD + sample for shard in self.pipeline[0] for sample in range(SHARD))


class RepeatedAugmentation(DistributedSampler):
    num_repeats = 3


def test_loaders_that_draw_with_replacement_are_recognised():
    again = RandomSampler(DATA, replacement=True)
    resampled = Pipeline(ResampledShards(0), str)
    for loader in (
        DataLoader(DATA, sampler=again),
        DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        DataLoader(DATA, batch_sampler=BatchSampler(again, 3, drop_last=True)),
        DataLoader(DATA * 100, batch_sampler=BatchSampler(again, 3, drop_last=True)),
        DataLoader(resampled, batch_size=BATCH),
        Pipeline(DataLoader(resampled, batch_size=None)),
        DataLoader(ChainDataset([resampled])),
        DataLoader(DATA, sampler=RepeatedAugmentation(DATA, 2, 0)),
    ):
        assert draws_with_replacement(loader)


def test_other_loaders_are_not():
    class Odd:
        @property
        def dataset(self):
            raise ValueError("not yet")

    itself = Odd()
    itself.sampler = itself
    for loader in (
        None,
        3,
        DATA,
        itself,
        DataLoader(DATA, shuffle=True),
        DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),
        DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 12, 3, replacement=False)),
        DataLoader(Pipeline(range(3))),
    ):
        assert not draws_with_replacement(loader)


def train_on_shards(rank, run_dir, tell):
    loader = DataLoader(Pipeline(ResampledShards(rank)), batch_size=BATCH)
    told = {"loader": loader} if tell else {}
    loop = Loop(rank, run_dir, plan={}, tier="scalars", **told)
    for step, ids in zip(range(32), loader, strict=False):
        loop.scope.batch(ids.tolist())
        loop.step(step)
    loop.close()


def train_all(rank, folder):
    for tell in (True, False):
        train_on_shards(rank, f"{folder}/{tell}", tell)


def test_whole_shards_drawn_again_are_no_fault_once_the_loader_is_known(tmp_path):
    run_ranks(train_all, 2, str(tmp_path))
    for tell in (True, False):
        run = Run.open(tmp_path / str(tell))
        assert [rank["with_replacement"] for rank in run.info["ranks"]] == [tell] * 2
        severities = [f.severity for f in run.findings() if f.cause == "data.overlapping_shards"]
        assert severities == [Severity.NOTE if tell else Severity.ERROR]
        assert diagnose_run(run) == tuple(run.findings())
