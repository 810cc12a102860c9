"""By what torch's pipeline schedules multiply gradients after the backward passes."""

import math
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import PipelineStage

from rankscope.wrappers.pipelining import ScheduleCalls


class Step:
    """Micro-batches whose gradients are 1, added up by hand."""

    def __init__(self):
        self.module = nn.Linear(1, 1)
        self.passes = 0
        self.gradient = 0.0
        self.calls = ScheduleCalls(self.module, lambda work: work(), lambda: self.passes)

    def call(self, num_micro, *, divides=True, module=None):
        self.passes += num_micro
        self.gradient += num_micro
        submod = SimpleNamespace(module=self.module) if module is None else module
        stage = SimpleNamespace(submod=submod, scale_grads=self.divide)
        PipelineStage.perform_reduce_grad(stage, num_micro if divides else 1)

    def divide(self, factor):
        self.gradient /= factor


@pytest.mark.parametrize("calls", [[4], [4, 4], [2, 3, 5]])
@pytest.mark.parametrize("divides", [True, False])
def test_it_is_what_the_divisions_leave_of_each_pass(calls, divides):
    step = Step()
    for again in range(2):
        step.passes, step.gradient = 0, 0.0
        for num_micro in calls:
            step.call(num_micro, divides=divides)
        assert step.calls.found
        assert step.calls.collect() == pytest.approx(step.gradient / step.passes), again
    assert math.isnan(step.calls.collect())
    assert not step.calls.found


def test_other_stages_and_what_comes_after_the_end_do_not_count():
    step = Step()
    step.call(4, module=nn.Linear(1, 1))
    assert not step.calls.found
    step.calls.stop()
    step.call(4)
    assert math.isnan(step.calls.collect())
