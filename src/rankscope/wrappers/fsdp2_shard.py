"""Measures a shard as a part of its parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.gradients.totals import GradientTotals

_LONG_RUN = 1 << 14
_SCRATCH_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Which slice of a parameter a shard holds.

    Attributes:
        shape: Shape of the whole parameter.
        dim: The dimension that is cut.
        first: Index in that dimension where the shard begins.
    """

    shape: Sequence[int]
    dim: int
    first: int

    @property
    def stride(self) -> int:
        """Elements from the beginning of one run to that of the next."""
        return self.shape[self.dim] * self._inner

    @property
    def offset(self) -> int:
        """Position of the first element."""
        return self.first * self._inner

    @property
    def _inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])


Shard = tuple[str, Tensor, ShardPlace]
"""A parameter's name, a rank's contiguous slice of it, and the slice's place."""


def measure_shards(sketcher: Sketcher, shards: Sequence[Shard], into: GradientTotals) -> None:
    """Add shards to totals such that all ranks' together give the totals of whole parameters.

    In memory a shard is a number of runs of elements that lie apart in the parameter: one run when
    the first dimension is cut. All runs that are alone in a shard, or long, are measured in one
    call.

    Args:
        sketcher: Measures.
        shards: May be empty ones.
        into: The totals to add to.
    """
    runs: list[Measured] = []
    for name, shard, place in shards:
        if not shard.numel():
            continue
        several = shard.detach().reshape(math.prod(place.shape[: place.dim]), -1)
        if len(several) == 1 or several.shape[1] >= _LONG_RUN:
            runs += [
                (name, run, index * place.stride + place.offset)
                for index, run in enumerate(several)
            ]
        else:
            _measure_short_runs(sketcher, name, several, place, into)
    sketcher.measure_many(runs, into)


def _measure_short_runs(
    sketcher: Sketcher, name: str, runs: Tensor, place: ShardPlace, into: GradientTotals
) -> None:
    """Lay several runs out with the zeros that belong between them, in a tensor of limited size."""
    num_runs, length = runs.shape
    stride = place.stride
    offset = place.offset
    at_once = min(num_runs, max(1, _SCRATCH_ELEMENTS // stride))
    scratch = torch.zeros(at_once, stride, dtype=runs.dtype, device=runs.device)
    for index, part in zip(range(0, num_runs, at_once), torch.split(runs, at_once), strict=True):
        scratch[: len(part), offset : offset + length] = part
        sketcher.measure(name, scratch[: len(part)], into, start=index * stride)
