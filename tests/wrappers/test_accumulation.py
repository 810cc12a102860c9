"""Whether a step goes on after a reduction, from one gradient that the optimizer will read."""

import pytest
import torch

from rankscope.wrappers.accumulation import Accumulation
from rankscope.wrappers.optimizers import JointOptimizer


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


def test_an_optimizer_around_another_has_its_groups_once(parameters):
    inner = torch.optim.SGD(parameters, lr=0.1)
    outer = torch.optim.SGD(parameters, lr=0.1)
    outer.param_groups = inner.param_groups
    assert JointOptimizer([outer, inner]).param_groups == inner.param_groups


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


class Turns:
    """Two optimizers of one parameter each, and what is known of them."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.optimizers = [torch.optim.SGD([each], lr=0.1) for each in parameters]
        named = dict(zip("ab", parameters, strict=True))
        self.seen = Accumulation(JointOptimizer(self.optimizers), named)

    def update(self, number, *reached):
        """Return what is known before a backward pass that reaches parameters, and update one."""
        known = self.seen.adds_to_applied(), self.seen.old()
        for parameter in (self.parameters[each] for each in reached):
            held = torch.zeros(3) if parameter.grad is None else parameter.grad
            parameter.grad = held.add_(1)
        self.optimizers[number].step()
        self.seen.see_updated(1, self.optimizers[number])
        return known


def test_of_optimizers_that_take_turns_the_gradients_of_the_others_are_old(parameters):
    turns = Turns(parameters)
    assert turns.update(0, 0, 1) == (False, frozenset())
    for _ in range(6):
        turns.optimizers[1].zero_grad()
        assert turns.update(1, 1) == (False, frozenset("a"))
        turns.optimizers[0].zero_grad()
        assert turns.update(0, 0, 1) == (False, frozenset("b"))  # thrown away before its own turn


def test_where_all_gradients_are_old_nothing_tells_which_are_to_be_updated(parameters):
    turns = Turns(parameters)
    turns.update(0, 0, 1)
    turns.update(1, 0, 1)
    assert turns.update(0, 0, 1) == (True, frozenset())


def test_an_optimizer_whose_parameters_never_have_a_gradient_takes_no_turn(parameters):
    turns = Turns(parameters)
    known = [turns.update(0, 0) for _ in range(12)]
    assert known[-1] == (True, frozenset())


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
