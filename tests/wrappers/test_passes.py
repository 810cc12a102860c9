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
