"""Forward passes that take part in a step, and those that do not, in one process."""

from dataclasses import dataclass

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


def test_what_cannot_be_seen_is_taken_to_take_part():
    passes = Passes()
    for output in (None, torch.zeros(2), object()):
        passes.begin()
        passes.end(output)
    assert passes.take_idle() == frozenset()


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
