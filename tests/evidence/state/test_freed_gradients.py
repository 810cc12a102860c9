"""Gradients whose memory the training has freed: an error that is told, never a crash."""

import math

import pytest
import torch
from torch import nn

from rankscope.bus.groups import group_parameters
from rankscope.errors import UnsupportedError
from rankscope.evidence.state.meter import StateMeter
from rankscope.gradients.sketch import NormMeter, Sketcher

CPU = torch.device("cpu")
FREED = "whose memory has been freed"


def free(gradient: torch.Tensor) -> torch.Tensor:
    gradient.untyped_storage().resize_(0)
    return gradient


@pytest.mark.parametrize(("meter", "transposed"), [(Sketcher, False), (NormMeter, True)])
def test_it_is_not_measured(meter, transposed):
    sketcher = meter(CPU, group_parameters(["weight"]), 1021)
    totals = sketcher.new_totals()
    for _ in range(2):  # the second time, all is prepared
        sketcher.measure("weight", torch.ones(50, 60), totals)
    freed = free(torch.ones(60, 50).t() if transposed else torch.ones(50, 60))
    with pytest.raises(UnsupportedError, match=FREED):
        sketcher.measure("weight", freed, totals)
    with pytest.raises(UnsupportedError, match=FREED):
        sketcher.measure_norms([("weight", freed)], totals)
    assert float(totals.squared_norms[0]) == 2 * 50 * 60


def test_its_norm_is_unknown_where_state_is_compared():
    model = nn.Linear(50, 60, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StateMeter(model, optimizer, replicated=True)
    for step in range(3):
        meter.begin_step(step)
        optimizer.zero_grad()
        model(torch.ones(2, 50)).sum().backward()
        meter.see_reduced()
        if step == 1:
            free(model.weight.grad)
        meter.before_update()
        meter.see_state()
        _, values = meter.take().digests()
        known = "applied_scale" in values and math.isfinite(values["applied_scale"])
        assert known == (step != 1)
