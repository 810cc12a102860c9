"""Gradients that parameters get past a model's outputs, against those of the rest of the loss."""

import pytest
import torch
from torch import nn

from rankscope.evidence.reference.direct import DirectGradients


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def direct_of(loss, outputs, model):
    edges = {(output.grad_fn, output.output_nr) for output in outputs}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    direct = DirectGradients([loss], edges, names)
    loss.backward()
    direct.remove()
    return direct


def test_what_the_loss_takes_of_parameters_is_kept_and_what_came_through_outputs_is_not(model):
    other = nn.Linear(2, 2)  # of the loss's own
    first, last = model[0].weight, model[2].bias

    def loss_of(output):
        temperature = last.sum().exp()
        penalty = first.square().sum() + first.sum()
        return (other(output) * temperature).square().mean() + penalty * temperature

    outputs = [model(torch.randn(5, 3)) for _ in range(2)]
    direct = direct_of(loss_of(outputs[0] + outputs[1]), outputs, model)
    cut = loss_of((outputs[0] + outputs[1]).detach())
    assert not direct.takes_inner
    assert direct.by_name.keys() == {"0.weight", "2.bias"}
    for name, parameter in (("0.weight", first), ("2.bias", last)):
        (expected,) = torch.autograd.grad(cut, parameter, retain_graph=True)
        torch.testing.assert_close(direct.by_name[name], expected)


def test_a_loss_of_outputs_alone_takes_nothing_else(model):
    output = model(torch.randn(5, 3))
    direct = direct_of(output.square().mean(), [output], model)
    assert not direct.by_name
    assert not direct.takes_inner


def test_a_value_of_the_forward_pass_that_is_not_returned_is_seen(model):
    inner = model[0](torch.randn(5, 3))
    output = model[2](inner.relu())
    assert direct_of(output.sum() + inner.sum(), [output], model).takes_inner


def test_a_gradient_that_cannot_be_kept_does_not_reach_the_training(model, monkeypatch):
    output = model(torch.randn(5, 3))

    def fail(*_):
        raise MemoryError("none left")

    monkeypatch.setattr(DirectGradients, "_keep", fail)
    direct = direct_of(output.sum() + model[2].bias.square().sum(), [output], model)
    assert "none left" in direct.lost
    assert model[2].bias.grad is not None
