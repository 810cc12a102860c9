"""Which tensors of several pipeline stages are one weight, and which are equal by chance."""

import torch
from torch import nn

from rankscope.wrappers.fsdp2_mesh import find_ties, held_by


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
