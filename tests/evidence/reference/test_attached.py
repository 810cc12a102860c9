"""Losses that a function of autograd attaches, beside functions that only look alike."""

import pytest
import torch
from torch.autograd import Function

from rankscope.evidence.reference.attached import AttachedLosses


class Attach(Function):
    """Hands on an output; the number beside it gets a gradient that is in no output."""

    @staticmethod
    def forward(ctx, output, number):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


class Scale(Function):
    @staticmethod
    def forward(ctx, output, number):
        ctx.save_for_backward(output, number)
        return output * number

    @staticmethod
    def backward(ctx, gradient):
        output, number = ctx.saved_tensors
        return gradient * number, (gradient * output).sum()


class Pass(Function):
    @staticmethod
    def forward(ctx, output, number):
        return output.view_as(output), number.view_as(number)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def attached(function, number_of):
    given = torch.randn(3, 4, requires_grad=True)
    entered = given * 2
    found = function.apply(entered * 3, number_of(given))
    out = (found[0] + found[1] if function is Pass else found).tanh()
    losses = AttachedLosses([(out.grad_fn, out.output_nr)], [(entered.grad_fn, 0)])
    out.sum().backward()
    return losses.name


def test_a_number_with_a_gradient_of_its_own_is_an_attached_loss():
    assert attached(Attach, lambda given: given.square().mean()) == "Attach"


@pytest.mark.parametrize("function", [Scale, Pass])
def test_a_number_that_the_output_depends_on_is_none(function):
    assert attached(function, lambda given: given.square().mean()) == ""


def test_a_learned_number_is_none():
    scale = torch.ones((), requires_grad=True)
    assert attached(Attach, lambda given: scale) == ""
