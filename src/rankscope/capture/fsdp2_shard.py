"""Where a shard lies in its parameter, and how it is measured as a part of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.capture.sketch import Sketcher
from rankscope.capture.totals import GradientTotals

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


def measure_shard(
    sketcher: Sketcher, name: str, shard: Tensor, place: ShardPlace, into: GradientTotals
) -> None:
    """Add a shard to totals such that all shards together give the totals of the whole parameter.

    In memory the shard is a number of runs of elements that lie apart in the parameter: one run
    when the first dimension is cut. Where there are many short ones, several are laid out with
    the zeros that belong between them, in a scratch tensor of limited size.

    Args:
        sketcher: Measures.
        name: The parameter's name.
        shard: The slice that ``place`` describes, contiguous; may be empty.
        place: Where it lies.
        into: The totals to add to.
    """
    num_runs = math.prod(place.shape[: place.dim])
    inner = math.prod(place.shape[place.dim + 1 :])
    stride = place.shape[place.dim] * inner
    offset = place.first * inner
    if not shard.numel():
        return
    runs = shard.detach().reshape(num_runs, -1)
    length = runs.shape[1]
    if num_runs == 1 or length >= _LONG_RUN:
        for index, run in enumerate(runs):
            sketcher.measure(name, run, into, start=index * stride + offset)
        return
    at_once = min(num_runs, max(1, _SCRATCH_ELEMENTS // stride))
    scratch = torch.zeros(at_once, stride, dtype=shard.dtype, device=shard.device)
    for index, part in zip(range(0, num_runs, at_once), torch.split(runs, at_once), strict=True):
        scratch[: len(part), offset : offset + length] = part
        sketcher.measure(name, scratch[: len(part)], into, start=index * stride)
