"""Calls of the optimizer and its learning rate, with real optimizers."""

import math
from types import SimpleNamespace

import pytest
import torch

from rankscope.capture import OptimizerMeter


def watched(optimizer):
    meter = OptimizerMeter(optimizer)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: meter.count(optimizer))
    return meter


def make_parameter():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_calls_are_counted_between_two_collections():
    optimizer = torch.optim.SGD([make_parameter()], lr=0.5)
    meter = watched(optimizer)
    for num_calls in (1, 0, 3):
        for _ in range(num_calls):
            optimizer.step()
        assert meter.collect() == {"lr": 0.5, "optimizer_steps": num_calls}


def test_the_learning_rate_is_that_of_the_last_call():
    optimizer = torch.optim.SGD([make_parameter()], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    meter = watched(optimizer)
    rates = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()  # after the update: the rate of the next one
        rates.append(meter.collect()["lr"])
    assert rates == [0.5, 0.25, 0.125]


def test_it_is_that_of_the_first_of_several_groups():
    groups = [{"params": [make_parameter()]}, {"params": [make_parameter()], "lr": 7.0}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    meter = watched(optimizer)
    optimizer.step()
    assert meter.collect()["lr"] == 0.25


def test_before_the_first_call_the_rate_is_unknown_and_the_count_is_zero():
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    collected = meter.collect()
    assert collected["optimizer_steps"] == 0
    assert math.isnan(collected["lr"])


def test_without_an_optimizer_both_are_unknown():
    collected = OptimizerMeter(None).collect()
    assert sorted(collected) == ["lr", "optimizer_steps"]
    assert all(math.isnan(value) for value in collected.values())


def test_a_rate_in_a_tensor_on_the_host_is_read():
    optimizer = torch.optim.AdamW([make_parameter()], lr=torch.tensor(0.125))
    meter = watched(optimizer)
    optimizer.step()
    assert meter.collect() == {"lr": 0.125, "optimizer_steps": 1}


def test_a_rate_on_an_accelerator_is_not_waited_for():
    elsewhere = torch.tensor(0.5, device="meta")
    with pytest.raises(RuntimeError):
        float(elsewhere)  # what reading it would do
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    meter.count(SimpleNamespace(param_groups=[{"lr": elsewhere}]))
    collected = meter.collect()
    assert collected["optimizer_steps"] == 1
    assert math.isnan(collected["lr"])


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
        counts.append(meter.collect()["optimizer_steps"])
    assert counts == [1, 0, 1]
