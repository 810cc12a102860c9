"""A rank's experts are recorded under their numbers among all ranks' experts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope.errors import UnsupportedError
from rankscope.evidence.parity.held import DealtExperts, Naming
from support.ranks import run_ranks

WIDTH = 3


class Grouped(nn.Module):
    """Two experts, each a parameter; beside them one tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.weight1 = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.bias2 = nn.Parameter(torch.zeros(2, WIDTH))


class Layer(nn.Module):
    """A router, and two of all experts in each of the forms that frameworks give them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)])
        self.of_list = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2)) for _ in range(2))
        self.grouped = Grouped()
        self.num_local_experts = 2
        self.ep_group = None
        for parameter in [*self.of_list.parameters(), *self.grouped.parameters()]:
            parameter.allreduce = False


def names_and_places(rank):
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Layer()])  # as many layers as experts of a rank
    try:
        DealtExperts(model)
    except UnsupportedError as error:
        refused = str(error)
    model[1].ep_group = dist.group.WORLD
    experts = DealtExperts(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    naming = Naming([("moe.*", ["1.*"])], shapes, experts.pieces)
    return (
        refused,
        dict(experts.pieces),
        {n: naming.of(n) for n in shapes},
        experts.name("1.of_list.1"),
    )


@pytest.mark.ranks
def test_experts_have_their_numbers_among_those_of_all_ranks():
    first, second = run_ranks(names_and_places, 2)
    assert "1.of_list.0.0.weight stands for another expert on each rank" in first[0]
    names = {own: piece.name for own, piece in second[1].items()}
    assert names == {
        "1.of_list.0.0.weight": "1.of_list.2.0.weight",
        "1.of_list.0.0.bias": "1.of_list.2.0.bias",
        "1.of_list.1.0.weight": "1.of_list.3.0.weight",
        "1.of_list.1.0.bias": "1.of_list.3.0.bias",
        "1.grouped.weight0": "1.grouped.weight2",
        "1.grouped.weight1": "1.grouped.weight3",
        "1.grouped.bias2": "1.grouped.bias2",
    }
    assert all(piece.name == own for own, piece in first[1].items())
    assert [each[1]["1.grouped.bias2"][1:] for each in (first, second)] == [
        ((4, WIDTH), 0), ((4, WIDTH), 2)
    ]  # fmt: skip
    assert (first[3], second[3]) == ("1.of_list.1", "1.of_list.3")
    assert second[2]["1.of_list.0.0.weight"] == "moe.of_list.2.0.weight"
    assert second[2]["1.router.1.weight"] == "moe.router.1.weight"
    assert second[2]["0.weight"] == "0.weight"
