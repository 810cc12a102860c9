import math

import pytest
import torch
from torch import nn

from rankscope.bus.groups import cut_sections, group_parameters
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.fsdp2_mesh import find_ties, held_by
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


# Shared weights ---------------------------------------------------------------------------------


class Managed:
    def __init__(self, name, tensor):
        self.name = name
        self.tensor = tensor


def held(stage):
    return held_by([Managed(name, parameter) for name, parameter in stage.named_parameters()])


def stage(seed, **layers):
    torch.manual_seed(seed)
    module = nn.Module()
    for name, make in layers.items():
        module.add_module(name, make())
    return module


def block():
    return nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 8), "norm": nn.LayerNorm(4)})])


def embedding():
    return nn.Embedding(9, 4)


def head():
    return nn.Linear(4, 9, bias=False)


def found(*stages):
    return {tie.label: tie.certain for tie in find_ties([held(each) for each in stages])}


def test_a_copied_embedding_is_tied_and_equal_norms_are_not():
    first, last = stage(0, embedding=embedding, layers=block), stage(1, layers=block, head=head)
    assert found(first, last) == {}
    with torch.no_grad():
        last.head.weight.copy_(first.embedding.weight)
    assert found(first, last) == {"embedding.weight = head.weight": True}


def test_one_seed_of_all_stages_ties_nothing():
    assert found(stage(0, layers=block), stage(0, layers=block)) == {}
    middle = stage(0, layers=block)
    last = stage(0, layers=block, head=head)
    assert found(middle, last) == {}


def test_a_constant_of_every_layer_ties_nothing():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay = nn.Parameter(torch.arange(1.0, 9.0).log())

    def layers(number):
        return lambda: nn.ModuleList(Layer() for _ in range(number))

    first = stage(0, embedding=embedding, layers=layers(2))
    assert found(first, stage(1, layers=layers(2), head=head)) == {}
    one_each = found(
        stage(0, embedding=embedding, layers=layers(1)), stage(1, layers=layers(1), head=head)
    )
    assert one_each == {"layers.0.decay": False}
