"""Shards of a gradient, and its parts, against the whole."""

import math

import pytest
import torch

from rankscope.bus.groups import cut_sections, group_parameters
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.fsdp2_model import ShardPlace, measure_shards

SHAPES = [(13,), (3, 8, 50), (2, 4, 20_000), (40_000, 6)]
GROUPS = group_parameters(["weight"])


def make(shape):
    """Return a sketcher with a row for each 5,000 elements, a gradient, and its measurements."""
    sections = cut_sections({"weight": math.prod(shape)}, GROUPS, section_elements=5000)
    sketcher = Sketcher(torch.device("cpu"), GROUPS, 1021, sections=sections)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = sketcher.new_totals()
    sketcher.measure("weight", gradient, whole)
    return sketcher, gradient, whole


def assert_close(found, whole):
    torch.testing.assert_close(found.sketches, whole.sketches, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.squared_norms, whole.squared_norms, rtol=1e-6, atol=0)
    assert torch.equal(found.largest, whole.largest)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shards_add_up_to_the_whole(shape, num_shards):
    sketcher, gradient, whole = make(shape)
    for dim in range(len(shape)):
        parts = sketcher.new_totals()
        first = 0
        for shard in gradient.chunk(num_shards, dim):
            place = ShardPlace(shape, dim, first)
            measure_shards(sketcher, [("weight", shard.contiguous(), place)], parts)
            first += shard.shape[dim]
        empty = gradient.narrow(dim, 0, 0)
        measure_shards(sketcher, [("weight", empty, ShardPlace(shape, dim, shape[dim]))], parts)
        assert_close(parts, whole)


def test_contiguous_parts_add_up_to_the_whole():
    sketcher, gradient, whole = make((300, 70))
    parts = sketcher.new_totals()
    for start in range(0, 21_000, 3333):
        part = gradient.flatten()[start : start + 3333]
        sketcher.measure("weight", part, parts, start=start)
    assert_close(parts, whole)
