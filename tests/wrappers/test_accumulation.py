"""Whether a step goes on after a reduction, from one gradient that the optimizer will read."""

import pytest
import torch

from rankscope.wrappers.accumulation import Accumulation


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]


def reduced(parameters):
    """Return what has seen a reduction that left a gradient in the second parameter alone."""
    seen = Accumulation(torch.optim.SGD(parameters, lr=0.1))
    parameters[1].grad = torch.ones(3)
    seen.see_reduced()
    return seen


@pytest.mark.parametrize(("zeroed", "most"), [(False, 6), (True, 4)])
def test_steps_whose_gradients_one_update_takes_count_together(parameters, zeroed, most):
    seen = reduced(parameters)
    seen.see_updated(4)
    seen.end_step(4, updated=True)
    seen.see_reduced()
    assert not seen.goes_on(4)
    seen.end_step(4, updated=False)  # the rest of an epoch, and the next one's first
    if zeroed:
        parameters[1].grad.zero_()
    seen.adds_to_applied()
    seen.see_reduced()
    seen.see_updated(2)
    seen.end_step(2, updated=True)
    seen.see_reduced()
    assert seen.goes_on(most - 1)
    assert not seen.goes_on(most)


def test_passes_whose_gradients_were_dropped_do_not_count(parameters):
    seen = reduced(parameters)
    assert seen.goes_on(1)  # zero_grad may come, after the next forward pass
    parameters[1].grad = None
    seen.adds_to_applied(1)
    parameters[1].grad = torch.ones(3)
    for passes in (2, 1):
        seen.see_reduced()
        assert seen.goes_on(1)  # a loop may zero the gradient after each of two passes
        seen.see_updated(passes)
        seen.end_step(passes, updated=True)
        seen.see_reduced()
    assert not seen.goes_on(1)


def test_calls_of_a_schedule_make_one_step_as_long_as_every_update(parameters):
    """The first update shows how many passes it takes, even if torch drops gradients in it."""
    seen = reduced(parameters)
    parameters[1].grad = None
    assert not seen.goes_on(8, in_calls=True)
    seen.end_step(8, updated=False)
    seen.see_updated(8)
    seen.end_step(8, updated=True)
    assert [seen.goes_on(passes, in_calls=True) for passes in (8, 15, 16)] == [True, True, False]
    assert not seen.goes_on(8)
    seen.end_step(4, updated=True)  # the last of an epoch
    assert not seen.goes_on(8, in_calls=True)


def test_copies_of_the_parameters_are_updated_by_the_gradients_of_these(parameters):
    copies = [torch.nn.Parameter(torch.ones(3)) for _ in parameters]
    named = dict(zip("ab", parameters, strict=True))
    seen = Accumulation(torch.optim.SGD(copies, lr=0.1), named)
    parameters[0].grad = torch.ones(3)
    seen.see_updated(1)
    assert seen.adds_to_applied()
    parameters[0].grad = None
    assert not seen.adds_to_applied()
    others = Accumulation(torch.optim.SGD(copies[:1], lr=0.1), named)
    parameters[0].grad = torch.ones(3)
    others.see_updated(1)
    assert not others.adds_to_applied(), "they are not all copied"
