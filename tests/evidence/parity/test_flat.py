"""Parameters whose elements DeepSpeed or Megatron-core keeps in flat tensors of several ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.evidence.parity import figures as measuring
from rankscope.evidence.parity.figures import FigureMeter
from rankscope.evidence.parity.held import HeldElements
from rankscope.evidence.parity.start import renew_masters
from rankscope.wrappers.optimizers import trained_copies

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
    sizes = {"down": (10,), "norm": (5,), "up": (3, 4)}
    model, flat = rank_of(sizes, 7, 22)
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
    assert {(id(p), id(copy)) for p, copy in pairs} == {
        (id(model.weight), id(copies[1])),
        (id(model.bias), id(copies[0])),
    }
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
