"""Forward passes that take part in a step, and those that do not, in one process."""

from dataclasses import dataclass

import pytest
import torch

from rankscope.wrappers.passes import ForwardPasses, tensors_in


class Passes(ForwardPasses):
    def __init__(self) -> None:
        self.num_reached = 0
        self.trains = True
        super().__init__(self._count, lambda work, *args: work(*args))

    def _count(self, trained) -> None:
        self.num_reached += 1
        if self.trains:
            trained()

    def run(self, *more):
        self.begin()
        loss = torch.ones(3, requires_grad=True).square().sum()
        self.end({"loss": loss, "more": more})
        return loss


def test_a_pass_takes_part_once_backward_has_reached_it():
    passes = Passes()
    assert passes.current == -1
    losses = [passes.run() for _ in range(3)]
    assert passes.current == 2
    losses[0].backward()
    (2 * losses[2]).backward()
    assert passes.num_reached == 2
    assert passes.take_idle() == {1}
    assert passes.current == -1
    assert passes.take_idle() == frozenset()


def test_a_pass_takes_no_part_that_is_only_asked_for_other_gradients():
    passes = Passes()
    losses = [passes.run() for _ in range(2)]
    passes.trains = False
    for loss in losses:
        loss.backward(retain_graph=True)
    passes.trains = True
    losses[1].backward()
    assert passes.num_reached == 3
    assert passes.take_idle() == {0}


def test_a_pass_that_raised_takes_no_part():
    passes = Passes()
    passes.begin()
    passes.run().backward()
    assert passes.take_idle() == {0}


def test_what_cannot_be_seen_is_taken_to_take_part():
    passes = Passes()
    for output in (None, torch.zeros(2), object()):
        passes.begin()
        passes.end(output)
    assert passes.take_idle() == frozenset()


def test_a_backward_pass_that_raises_before_the_output_does_not_reach_it():
    def fail(gradient):
        raise ValueError("bad loss")

    passes = Passes()
    scaled = 2 * passes.run()
    scaled.register_hook(fail)
    with pytest.raises(ValueError, match="bad loss"):
        scaled.backward()
    assert passes.take_idle() == {0}


@dataclass
class Output:
    loss: torch.Tensor
    rest: object


def test_tensors_are_found_in_what_models_return():
    one, two, three = torch.zeros(3)
    output = Output(one, {"a": [two, (three,)], "b": 3, "c": range(3)})
    assert [t.data_ptr() for t in tensors_in(output)] == [t.data_ptr() for t in (one, two, three)]
    endless = []
    endless.append(endless)
    assert list(tensors_in(endless)) == []
    assert list(tensors_in([0] * 10**6 + [one])) == []  # not at any price
