"""Reports of this year about samples and about what the forward pass reads (P28, P29)."""

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from .job import Job, Trial, injects

DECAY = 0.99


class Indices(IterableDataset[int]):
    """The indices of a data set that knows how many there are."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._number))


class Part(IterableDataset[int]):
    """Every ``num_parts``-th index of another data set, from one on."""

    def __init__(self, dataset: Any, num_parts: int, part: int) -> None:
        self.dataset = dataset
        self._num_parts = num_parts
        self._part = part

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.dataset, self._part, None, self._num_parts)


@injects("HP28")
class StreamSplitOnce(Job):
    """Streams a data set that is split by rank once, and shuffled behind the split."""

    from_the_start = True
    num_splits = 1

    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        data: Any = Indices(self.num_samples)
        for _ in range(self.num_splits):
            data = Part(data, self.num_workers, rank)
        self.loader = DataLoader(data, batch_size=None)

    def draw(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            read = [int(index) for index in self.loader]
            random.Random(self.seed + epoch).shuffle(read)
            for begin in range(0, len(read) - self.batch_size + 1, self.batch_size):
                yield read[begin : begin + self.batch_size]

    def options(self) -> dict[str, Any]:
        return {**super().options(), "loader": self.loader}


@injects("P28")
class StreamSplitTwice(StreamSplitOnce):
    """Is split by rank, and again by what prepares the loader."""

    num_splits = 2


class Student(nn.Module):
    """A student whose embeddings are drawn to those of its averaged teacher."""

    def __init__(self, student: nn.Module, *, in_forward: bool) -> None:
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self._in_forward = in_forward

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher towards the student."""
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 1 - DECAY)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        if self._in_forward:
            self.follow()
        output: dict[str, Tensor] = self.student(**batch)
        with torch.no_grad():
            aim = self.teacher(**batch)["loss"]
        moments = self.norm(torch.stack([output["loss"], aim] * 4).view(2, 4))
        return {"loss": output["loss"] + 0.1 * (output["loss"] - aim).square() + 0 * moments.sum()}


@injects("HP29")
class TeacherFollowsSteps(Job):
    from_the_start = True
    accumulation = 4
    in_forward = False

    def build_model(self) -> nn.Module:
        return Student(super().build_model(), in_forward=self.in_forward)

    def after_optimizer(self) -> None:
        if not self.in_forward:
            self.module.follow()


@injects("P29")
class TeacherFollowsMicroBatches(TeacherFollowsSteps):
    in_forward = True
