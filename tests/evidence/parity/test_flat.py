"""Parameters whose elements DeepSpeed's ZeRO keeps in flat tensors of several ranks."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from rankscope.evidence.parity.figures import FigureMeter
from rankscope.evidence.parity.held import HeldElements

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
