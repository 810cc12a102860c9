"""Matrices that are trained beside the adapters that are added to them."""

import pytest
import torch
from torch import nn

from rankscope.evidence.state.rare import adapted_matrices


class Adapted(nn.Module):
    """A layer with a low-rank adapter, as PEFT builds it."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Model(nn.Module):
    def __init__(self, trained=()):
        super().__init__()
        self.embed = nn.Linear(6, 8).requires_grad_(False)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 6)
        self.requires_grad_(False)
        self.q, self.k = Adapted(self.q), Adapted(self.k)
        for name in trained:
            self.get_parameter(name).requires_grad_()

    def forward(self, x):
        hidden = self.embed(x)
        return self.out(self.q(hidden) * self.k(hidden)).square().mean()


def found_in(model, held=None):
    parameters = dict(model.named_parameters())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    return adapted_matrices(parameters, trained if held is None else held(trained))


def test_a_trained_base_is_named_whatever_the_form_of_its_adapter():
    assert found_in(Model(["k.base_layer.weight", "out.weight"])) == ["k.base_layer.weight"]

    class Experts(nn.Module):  # factors the other way round, and no modules of their own
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(6, 12))
            self.lora_in = nn.Parameter(torch.randn(6, 2))
            self.lora_out = nn.Parameter(torch.zeros(2, 12))
            self.router = nn.Parameter(torch.randn(6, 3), requires_grad=False)

    assert found_in(nn.ModuleDict({"a": Experts()})) == ["a.up"]


@pytest.mark.parametrize(
    "model",
    [
        Model(),
        Model(["out.weight", "embed.weight", "q.base_layer.bias"]),  # modules to save, biases
        Model().requires_grad_(True),  # nothing is frozen
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 4)),
    ],
)
def test_what_trains_on_purpose_is_not_named(model):
    if isinstance(model, nn.Sequential):
        nn.init.zeros_(model[2].weight)  # a layer that begins at zero, of full rank
    assert found_in(model) == []


def test_a_base_that_the_optimizer_does_not_hold_or_an_adapter_that_has_learned_is_not_named():
    model = Model(["k.base_layer.weight"])
    assert found_in(model, lambda names: [n for n in names if "base" not in n]) == []
    nn.init.ones_(model.k.lora_B["default"].weight)
    assert found_in(model) == []
