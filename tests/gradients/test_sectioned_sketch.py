"""Gradients measured section by section: each row as if there were nothing else."""

import numpy as np
import pytest
import torch

from rankscope.bus.groups import cut_sections, group_parameters
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.fsdp2_model import ShardPlace, measure_shards

SHAPES = {"a.w": (40, 25), "a.b": (30,), "b.w": (10, 7)}
WIDTH = 61
CPU = torch.device("cpu")
GROUPS = group_parameters(SHAPES)
SECTIONS = cut_sections(
    {name: int(np.prod(shape)) for name, shape in SHAPES.items()}, GROUPS, section_elements=260
)


def make_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def sectioned():
    return Sketcher(CPU, GROUPS, WIDTH, seed=5, sections=SECTIONS)


def tensors(sketcher, gradients):
    return measured(sketcher, gradients).tensors


def measured(sketcher, gradients):
    totals = sketcher.new_totals()
    for name, gradient in gradients.items():
        sketcher.measure(name, gradient, totals)
    return totals


def assert_close(found, expected):
    sketches, squared_norms, *exact = found
    torch.testing.assert_close(sketches, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squared_norms, expected[1], rtol=1e-6, atol=0)
    assert [each.tolist() for each in exact] == [each.tolist() for each in expected[2:]]


@pytest.mark.parametrize(("num_shards", "dim"), [(2, 0), (3, 1)])
def test_shards_add_up_in_each_section(dim, num_shards):
    gradients, sketcher = make_gradients(), sectioned()
    totals = sketcher.new_totals()
    for name, gradient in gradients.items():
        cut, first = min(dim, gradient.dim() - 1), 0
        for shard in torch.tensor_split(gradient, num_shards, cut):
            place = ShardPlace(tuple(gradient.shape), cut, first)
            measure_shards(sketcher, [(name, shard.contiguous(), place)], totals)
            first += shard.shape[cut]
    assert_close(totals.tensors, tensors(sectioned(), gradients))


def test_contiguous_parts_of_a_parameter_find_their_sections():
    gradients, sketcher = make_gradients(), sectioned()
    flat, totals = gradients["a.w"].flatten(), sketcher.new_totals()
    for start in range(0, len(flat), 333):
        sketcher.measure("a.w", flat[start : start + 333], totals, start=start)
    assert_close(totals.tensors, tensors(sketcher, {"a.w": gradients["a.w"]}))
