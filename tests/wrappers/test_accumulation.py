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
