"""What the user intends."""

import json

import numpy as np
import pytest

from rankscope.bus.plan import Plan
from rankscope.errors import UsageError


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"loss_weighting": "token", "random": "same", "repeats": True, "learning_rate": 0.5},
        {"seed": 42, "local_steps": 4, "independent": True, "random": "different"},
        {"learning_rate": [0.0, 1e-4, 0.1], "loss_weighting": "worker"},
    ],
)
def test_it_comes_back_from_json(given):
    plan = Plan.of(given)
    assert Plan.of(json.loads(json.dumps(plan.to_json()))) == plan
    assert {name: plan.to_json()[name] for name in given} == given


def test_rates_may_be_of_any_kind_of_number():
    assert Plan.of({"learning_rate": np.float32(0.5)}).learning_rate == 0.5
    assert Plan.of({"learning_rate": (1, np.float64(0.5))}).learning_rate == (1.0, 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["token"], "expected a dict, got list"),
        ({"randm": "same"}, "got 'randm'; did you mean 'random'?"),
        ({"lr": 0.1}, "plan has entries loss_weighting, .*learning_rate, .*; got 'lr'"),
        ({"loss_weighting": "sample"}, "'token' or 'worker', got 'sample'"),
        ({"random": True}, "'same' or 'different', got True"),
        ({"seed": "42"}, "a whole number, got '42'"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
        ({"repeats": "yes"}, "True or False, got 'yes'"),
        ({"learning_rate": []}, "got an empty list"),
        ({"learning_rate": -0.1}, "at least 0.*got -0.1"),
        ({"learning_rate": float("nan")}, "got nan"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        Plan.of(given)
