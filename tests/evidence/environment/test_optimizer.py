"""Calls of the optimizer and its settings, with real optimizers."""

import math
from types import SimpleNamespace

import pytest
import torch

from rankscope.evidence.environment.probe import OptimizerMeter


def watched(optimizer):
    meter = OptimizerMeter(optimizer)
    optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: meter.after_update(optimizer, complete=True)
    )
    return meter


def make_parameter():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_settings_on_an_accelerator_are_not_waited_for():
    elsewhere = torch.tensor(0.5, device="meta")
    with pytest.raises(RuntimeError):
        float(elsewhere)  # what reading it would do
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    digests = []
    for eps in (elsewhere, elsewhere.clone()):
        group = {"lr": elsewhere, "betas": (elsewhere, 0.9), "eps": eps, "momentum": 0.5}
        meter.after_update(SimpleNamespace(param_groups=[group]), complete=True)
        collected = meter.take()
        assert collected["optimizer_steps"] == 1
        assert math.isnan(collected["lr"])
        digests.append(collected["settings_digest"])
    assert digests[0] == digests[1]  # of the momentum alone


def test_an_update_that_a_gradient_scaler_skips_is_not_counted():
    parameter = make_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    meter = watched(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    counts = []
    for factor in (1.0, float("inf"), 1.0):
        parameter.grad = None
        scaler.scale((factor * parameter).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(meter.take()["optimizer_steps"])
    assert counts == [1, 0, 1]


@pytest.mark.parametrize(
    "optimizer",
    [
        object(),
        SimpleNamespace(param_groups=["weights"]),
        SimpleNamespace(param_groups=[{"lr": "auto", "weight_decay": None, 3: object()}]),
    ],
)
def test_what_an_exotic_optimizer_does_not_have_is_left_out(optimizer):
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    meter.after_update(optimizer, complete=True)
    collected = meter.take()
    assert collected["optimizer_steps"] == 1
    assert math.isnan(collected["lr"])
    assert math.isnan(collected["weight_decay"])
