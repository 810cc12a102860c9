"""Forward passes that take part in a step, and those that do not, in one process."""

from dataclasses import dataclass

import torch

from rankscope.wrappers.passes import ForwardPasses, tensors_in


def test_what_cannot_be_seen_is_taken_to_take_part():
    passes = ForwardPasses(lambda trained: trained(), lambda work, *args: work(*args))
    for output in (None, torch.zeros(2), object()):
        passes.begin()
        passes.end(output)
    assert passes.take_idle() == frozenset()


def test_tensors_without_a_graph_are_no_output_that_a_loss_can_come_from():
    passes = ForwardPasses(lambda trained: trained(), lambda work, *args: work(*args))
    graph = torch.ones(2, requires_grad=True) * 2
    for output in (torch.zeros(2), (torch.zeros(2), graph), None, {"ids": torch.zeros(2)}):
        passes.begin()
        passes.end(output)
    passes.begin()
    passes.train()  # inside of the forward pass, which returns the loss without its graph
    passes.end(torch.zeros(()))
    with torch.no_grad():  # the gradient is an estimate from losses alone
        passes.begin()
        passes.end(torch.zeros(()))
    assert passes.graphless == {0, 3}


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
