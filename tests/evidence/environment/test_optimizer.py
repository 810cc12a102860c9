"""Calls of the optimizer and its settings, with real optimizers."""

import math
from types import SimpleNamespace

import pytest
import torch

from rankscope.evidence.environment.probe import OptimizerMeter


def watched(optimizer):
    meter = OptimizerMeter(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: meter.begin(optimizer))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: meter.count(optimizer))
    return meter


def make_parameter():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def settings_digest(*groups, **settings):
    """Return the digest of the settings with which an optimizer is called."""
    return collected(*groups, **settings)["settings_digest"]


def collected(*groups, kind=torch.optim.AdamW, **settings):
    """Return what is known of the settings with which an optimizer is called."""
    groups = groups or ({},)
    optimizer = kind([{"params": [make_parameter()], **group} for group in groups], **settings)
    meter = watched(optimizer)
    optimizer.step()
    return meter.collect()


def test_calls_are_counted_between_two_collections():
    optimizer = torch.optim.SGD([make_parameter()], lr=0.5)
    meter = watched(optimizer)
    for num_calls in (1, 0, 3):
        for _ in range(num_calls):
            optimizer.step()
        collected = meter.collect()
        assert (collected["lr"], collected["optimizer_steps"]) == (0.5, num_calls)


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


def test_rate_and_decay_are_those_of_the_first_of_several_groups():
    groups = [
        {"params": [make_parameter()], "weight_decay": 0.125},
        {"params": [make_parameter()], "lr": 7.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.25, weight_decay=0.5)
    meter = watched(optimizer)
    optimizer.step()
    collected = meter.collect()
    assert (collected["lr"], collected["weight_decay"]) == (0.25, 0.125)


def test_before_the_first_call_settings_are_unknown_and_the_count_is_zero():
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    collected = meter.collect()
    assert collected["optimizer_steps"] == 0
    assert math.isnan(collected["lr"])
    assert "settings_digest" not in collected


def test_without_an_optimizer_all_are_unknown():
    collected = OptimizerMeter(None).collect()
    assert sorted(collected) == ["lr", "lr_changes", "optimizer_steps", "weight_decay"]
    assert all(math.isnan(value) for value in collected.values())


def test_a_rate_in_a_tensor_on_the_host_is_read():
    optimizer = torch.optim.AdamW([make_parameter()], lr=torch.tensor(0.125))
    meter = watched(optimizer)
    optimizer.step()
    collected = meter.collect()
    assert (collected["lr"], collected["optimizer_steps"]) == (0.125, 1)


def test_settings_on_an_accelerator_are_not_waited_for():
    elsewhere = torch.tensor(0.5, device="meta")
    with pytest.raises(RuntimeError):
        float(elsewhere)  # what reading it would do
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    digests = []
    for eps in (elsewhere, elsewhere.clone()):
        group = {"lr": elsewhere, "betas": (elsewhere, 0.9), "eps": eps, "momentum": 0.5}
        meter.count(SimpleNamespace(param_groups=[group]))
        collected = meter.collect()
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
        counts.append(meter.collect()["optimizer_steps"])
    assert counts == [1, 0, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"betas": (0.9, 0.98)},
        {"eps": 1e-6},
        {"amsgrad": True},
        {"maximize": True},
    ],
)
def test_another_setting_gives_another_digest(other):
    settings = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    digest = settings_digest(**settings)
    assert 0 <= digest < 2**63
    assert settings_digest(**settings) == digest
    assert settings_digest(**{**settings, **other}) != digest


def test_what_has_a_column_of_its_own_is_no_part_of_the_digest():
    assert settings_digest(lr=0.5) == settings_digest(lr=0.25)
    assert settings_digest(weight_decay=0.5) == settings_digest(weight_decay=0.25)
    assert settings_digest({}, {}, lr=0.5) == settings_digest({}, {"lr": 0.25}, lr=0.5)
    bounded = {"max_lr": 0.5, "min_lr": 0.1, "initial_lr": 0.2}  # as a cyclic schedule keeps them
    assert settings_digest(bounded) == settings_digest()


def test_rates_of_other_groups_have_a_digest():
    def rates(*groups, **settings):
        return collected(*groups, **settings)["rates_digest"]

    assert rates({}, {}, lr=0.5) == rates({}, {"lr": 0.5}, lr=0.5)
    assert rates({}, {}, lr=0.5) == rates({"lr": 0.25}, {}, lr=0.5)
    assert rates({}, {}, lr=0.5) != rates({}, {"lr": 0.25}, lr=0.5)
    assert "rates_digest" not in collected(lr=0.5)


def test_a_setting_in_a_later_group_counts():
    assert settings_digest({}, {"weight_decay": 0.5}, lr=1.0) != settings_digest({}, {}, lr=1.0)


def test_equal_numbers_of_other_types_are_the_same_setting():
    as_floats = settings_digest(lr=0.5, weight_decay=0.0, betas=(0.9, 0.5))
    assert settings_digest(lr=0.5, weight_decay=0, betas=[0.9, 0.5]) == as_floats


@pytest.mark.parametrize("betas", [[0.9, 0.99], (torch.tensor(0.9), 0.99)])
def test_a_setting_that_is_changed_in_place_is_seen(betas):
    group = {"params": [], "lr": 0.5, "betas": betas}
    meter = OptimizerMeter(None)
    meter.count(SimpleNamespace(param_groups=[group]))
    before = meter.collect()["settings_digest"]
    if isinstance(betas, list):
        betas[0] = 0.5
    else:
        betas[0].fill_(0.5)
    meter.count(SimpleNamespace(param_groups=[group]))
    assert meter.collect()["settings_digest"] != before


def test_settings_are_those_at_the_call_though_the_optimizer_changes_them():
    group = {"params": [], "lr": 0.5, "weight_decay": 0.25}
    optimizer = SimpleNamespace(param_groups=[group])
    meter = OptimizerMeter(None)
    meter.begin(optimizer)
    group |= {"lr": 0.0, "weight_decay": 0.0}  # what its step does
    meter.count(optimizer)
    collected = meter.collect()
    assert (collected["lr"], collected["weight_decay"]) == (0.5, 0.25)


@pytest.mark.parametrize(
    "optimizer",
    [
        object(),
        SimpleNamespace(param_groups=None),
        SimpleNamespace(param_groups=[]),
        SimpleNamespace(param_groups=["weights"]),
        SimpleNamespace(param_groups=[{"params": []}]),
        SimpleNamespace(param_groups=[{"lr": "auto", "weight_decay": None, 3: object()}]),
    ],
)
def test_what_an_exotic_optimizer_does_not_have_is_left_out(optimizer):
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    meter.begin(optimizer)
    meter.count(optimizer)
    collected = meter.collect()
    assert collected["optimizer_steps"] == 1
    assert math.isnan(collected["lr"])
    assert math.isnan(collected["weight_decay"])


def test_what_an_optimizer_holds_of_the_model_has_a_digest():
    parameters = [make_parameter() for _ in range(3)]

    def held(*places):
        optimizer = torch.optim.SGD([parameters[place] for place in places], lr=0.5)
        meter = OptimizerMeter(optimizer, parameters)
        meter.count(optimizer)
        first = meter.collect().get("held_digest")
        optimizer.add_param_group({"params": [make_parameter()]})  # which is not the model's
        meter.count(optimizer)
        assert meter.collect().get("held_digest") == first
        return first

    assert held(0, 1) == held(1, 0)
    assert held(0, 1) != held(0, 2)
    flat = make_parameter()
    meter = OptimizerMeter(torch.optim.SGD([flat], lr=0.5), parameters)
    meter.count(torch.optim.SGD([flat], lr=0.5))
    assert "held_digest" not in meter.collect()
