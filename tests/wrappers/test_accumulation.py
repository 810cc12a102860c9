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


def test_a_gradient_that_nobody_has_touched_waits_for_more(parameters):
    assert reduced(parameters).goes_on(1)


@pytest.mark.parametrize(
    "touch",
    [
        lambda parameter: setattr(parameter, "grad", None),
        lambda parameter: setattr(parameter, "grad", torch.ones(3)),
        lambda parameter: parameter.grad.zero_(),
        lambda parameter: parameter.grad.mul_(0.5),
    ],
    ids=["taken away", "replaced", "zeroed", "scaled"],
)
def test_one_that_was_touched_does_not(parameters, touch):
    seen = reduced(parameters)
    touch(parameters[1])
    assert not seen.goes_on(1)


def test_no_step_takes_more_forward_passes_than_some_update_took(parameters):
    seen = reduced(parameters)
    assert seen.goes_on(50)
    assert not seen.goes_on(64)
    seen.see_updated(3)
    seen.see_updated(2)
    seen.see_reduced()
    assert [seen.goes_on(passes) for passes in (1, 2, 3)] == [True, True, False]


def test_without_a_gradient_or_a_parameter_a_reduction_ends_the_step(parameters):
    seen = Accumulation(torch.optim.SGD(parameters, lr=0.1))
    seen.see_reduced()
    assert not seen.goes_on(1)
    bare = Accumulation(object())
    bare.see_reduced()
    assert not bare.goes_on(1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_an_update_has_applied_is_known_until_it_is_zeroed(parameters, set_to_none):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = Accumulation(optimizer)
    assert not seen.adds_to_applied()
    parameters[1].grad = torch.ones(3)
    assert not seen.adds_to_applied()
    optimizer.step()
    seen.see_updated(1)
    assert seen.adds_to_applied()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert not seen.adds_to_applied()


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
