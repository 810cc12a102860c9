from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope.errors import UnsupportedError
from rankscope.evidence.parity import figures as measuring
from rankscope.evidence.parity.figures import FigureMeter, Part, part_of
from rankscope.evidence.parity.held import DealtExperts, HeldElements, Naming
from rankscope.evidence.parity.start import renew_masters
from rankscope.wrappers.optimizers import trained_copies
from support.ranks import run_ranks

CPU = torch.device("cpu")


def address(start, numel):
    return SimpleNamespace(start=start, numel=numel)


def rank_of(sizes, first, last):
    """Return a model, and a flat tensor of the elements ``[first, last)`` of its parameters."""
    model = nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    flat = torch.zeros(last - first)
    begin = 0
    for parameter in model.values():
        start, end = max(begin, first), min(begin + parameter.numel(), last)
        parameter._hp_mapping = None
        if start < end:
            own = address(start - first, end - start)
            parameter._hp_mapping = SimpleNamespace(
                hp_fragment=flat.narrow(0, own.start, own.numel),
                hp_fragment_address=own,
                lp_fragment_address=address(start - begin, end - start),
            )
        begin += parameter.numel()
    return model, flat


def test_pieces_of_two_ranks_add_up_to_the_whole():
    sizes = {"down": (10,), "norm": (5,), "up": (3, 4)}
    gradients = {name: torch.randn(size) for name, size in sizes.items()}
    whole = torch.cat([each.flatten() for each in gradients.values()])
    meter = FigureMeter({name: each.numel() for name, each in gradients.items()}, CPU)
    expected = meter.measure(gradients.items())
    squares, sketches = {}, {}
    for first, last in ((0, 16), (16, 27)):
        model, flat = rank_of(sizes, first, last)
        names = {id(parameter): name for name, parameter in model.items()}
        elements = HeldElements(model, names, {})
        held = elements.in_tensor(flat)
        figures = meter.measure((name, part(whole[first:last])) for name, part in held)
        assert elements.in_tensor(torch.zeros(16)) == ()
        for name, *found in zip(
            figures.names, figures.squares_PQ, figures.sketches_PQK, strict=True
        ):
            squares[name] = squares.get(name, 0) + found[0]
            sketches[name] = sketches.get(name, 0) + found[1]
    assert set(squares) == set(sizes)
    for at, name in enumerate(expected.names):
        np.testing.assert_allclose(squares[name], expected.squares_PQ[at], rtol=1e-5)
        np.testing.assert_allclose(sketches[name], expected.sketches_PQK[at], atol=1e-5)


def test_masters_follow_the_parameters():
    model, flat = rank_of({"down": (10,), "norm": (5,), "up": (3, 4)}, 7, 22)
    elements = HeldElements(model, {id(p): name for name, p in model.items()}, {})
    whole = torch.arange(27.0)
    for parameter, own in zip(model.values(), whole.split([10, 5, 12]), strict=True):
        parameter.data.copy_(own.view(parameter.shape))
    renew_masters(model, elements)
    assert torch.equal(flat, whole[7:22])


def test_copies_that_a_loop_keeps_in_another_type_are_masters():
    model = nn.Linear(3, 2).bfloat16()
    copies = [nn.Parameter(p.detach().float()) for p in reversed([*model.parameters()])]
    pairs = trained_copies([torch.optim.SGD(copies, lr=1)], model.parameters())
    expected = {(id(model.weight), id(copies[1])), (id(model.bias), id(copies[0]))}
    assert {(id(p), id(copy)) for p, copy in pairs} == expected
    elements = HeldElements(model, {id(model.weight): "weight", id(model.bias): "bias"}, {}, pairs)
    (held,) = elements.in_tensor(copies[1])
    assert (held.name, held.part(copies[1]).shape) == ("weight", (6,))
    model.weight.data.fill_(2)
    renew_masters(model, elements)
    assert torch.equal(copies[1], torch.full((2, 3), 2.0))
    alike = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    assert trained_copies([torch.optim.SGD(alike, lr=1)], model.parameters()) == []


@pytest.mark.parametrize("master", [False, True], ids=["view", "copy in float32"])
def test_a_shard_of_megatron_core_is_known_by_its_place(master):
    weight = nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16 if master else torch.float32))
    other = nn.Parameter(torch.randn(3))
    shard = weight.detach().view(-1)[7:16]
    if master:
        shard = weight.main_param = shard.clone().float()
    model = nn.ParameterDict({"other": other, "weight": weight})
    elements = HeldElements(model, {id(other): "other", id(weight): "weight"}, {"weight": 7})
    (held,) = elements.in_tensor(shard)
    part = held.part(torch.arange(9.0))
    assert (held.name, part.shape, part.first) == ("weight", (20,), (7,))
    assert torch.equal(part.tensor, torch.arange(9.0))
    assert elements.in_tensor(torch.zeros(9)) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differences_are_read_piece_by_piece_in_the_place_of_what_was_before(monkeypatch, dtype):
    monkeypatch.setattr(measuring, "_AT_ONCE", 8)
    before = {name: torch.randn(6, dtype=dtype) for name in "abc"}
    after = {name: tensor + torch.randn(6, dtype=dtype) for name, tensor in before.items()}
    meter = FigureMeter(dict.fromkeys("abc", 6), CPU)
    expected = meter.measure((n, after[n].float() - before[n].float()) for n in "abc")
    found = meter.differences(list(after.items()), before)
    assert found.names == expected.names == ("a", "b", "c")
    np.testing.assert_array_equal(found.sketches_PQK, expected.sketches_PQK)
    np.testing.assert_array_equal(found.squares_PQ, expected.squares_PQ)


WIDTH = 3


class Grouped(nn.Module):
    """Two experts, each a parameter; beside them one tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.weight1 = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.bias2 = nn.Parameter(torch.zeros(2, WIDTH))


class Layer(nn.Module):
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
    named = {name: naming.of(name) for name in shapes}
    return refused, dict(experts.pieces), named, experts.name("1.of_list.1")


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


RULES = [("block.*.qkv", ["h.*.q", "h.*.k", "h.*.v"]), ("head.*", ["lm.*"])]
SHAPES = {"h.0.q": (6, 5), "h.0.k": (2, 5), "h.0.v": (2, 5), "lm.weight": (3, 5), "norm": (5,)}


def test_names_are_those_of_the_other_layout():
    naming = Naming(RULES, SHAPES)
    assert [naming.of(name) for name in SHAPES] == [
        *["block.0.qkv"] * 3, "head.weight", "norm"
    ]  # fmt: skip
    assert naming.shape("h.0.v", (2, 5)) == (10, 5)
    assert naming.placed("h.0.v", part_of(torch.ones(2, 5))).first == (8, 0)
    assert naming.placed("h.0.k", Part(torch.ones(3), (10,), (2,)))[1:3] == ((50,), (32,))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"h.0.q": (6, 5), "h.0.k": (2, 5)}, "no parameter is called h.0.v, a part of"),
        ({"h.0.q": (6, 5), "h.0.k": (2, 4), "h.0.v": (2, 5)}, "6 × 5, 2 × 4, 2 × 5"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_refused(shapes, expected):
    with pytest.raises(UnsupportedError, match=expected):
        Naming(RULES, shapes)
