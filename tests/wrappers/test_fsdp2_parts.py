"""The parts of the FSDP2 tap that need no ranks: names, shards, and listening to torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankscope.bus.groups import group_parameters
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.fsdp2_model import ShardPlace, measure_shards

SHAPES = [(13,), (3, 8, 50), (2, 4, 20_000), (40_000, 6)]


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shards_add_up_to_the_whole(shape, num_shards):
    sketcher = Sketcher(torch.device("cpu"), group_parameters(["weight"]), 1021)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator)
    whole = sketcher.new_totals()
    sketcher.measure("weight", gradient, whole)
    for dim in range(len(shape)):
        parts = sketcher.new_totals()
        first = 0
        for shard in gradient.chunk(num_shards, dim):
            place = ShardPlace(shape, dim, first)
            measure_shards(sketcher, [("weight", shard.contiguous(), place)], parts)
            first += shard.shape[dim]
        empty = gradient.narrow(dim, 0, 0)
        measure_shards(sketcher, [("weight", empty, ShardPlace(shape, dim, shape[dim]))], parts)
        error = (parts.sketches - whole.sketches).norm() / whole.sketches.norm()
        assert float(error) < 1e-5
        torch.testing.assert_close(parts.squared_norms, whole.squared_norms, rtol=1e-6, atol=0)
        assert torch.equal(parts.largest, whole.largest)


class Ear:
    """Remembers the calls that it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def hear(self, *args: Any, **kwargs: Any) -> None:
        self.heard.append((*args, kwargs))


def add(left: int, right: int = 0) -> int:
    return left + right


@pytest.fixture
def place() -> SimpleNamespace:
    return SimpleNamespace(function=add)


class TestListening:
    def test_calls_go_through_and_are_told(self, place):
        relay, one, other = Relay(place, "function"), Ear(), Ear()
        stop_one, stop_other = relay.subscribe(before=one.hear), relay.subscribe(before=other.hear)
        assert place.function(1, right=2) == 3
        stop_one()
        assert place.function(3) == 3
        stop_other()
        assert place.function is add
        assert one.heard == [(1, {"right": 2})]
        assert other.heard == [(1, {"right": 2}), (3, {})]
