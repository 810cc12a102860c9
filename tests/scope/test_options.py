"""``WatchOptions`` is the one place of the rarer options; ``watch`` takes them by name as well."""

from typing import get_type_hints

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import WatchOptions, watch
from rankscope.bus.plan import Tier
from rankscope.errors import UsageError
from rankscope.session.options import WatchKeywords, chosen_tier
from support.ranks import run_ranks


def test_editors_and_type_checkers_know_every_option():
    assert get_type_hints(WatchKeywords) == get_type_hints(WatchOptions)


def test_options_come_from_the_object_and_by_name():
    given = WatchOptions(every=10)
    assert WatchOptions.of(None, {}) == WatchOptions()
    assert WatchOptions.of(given, {}) == given
    assert WatchOptions.of(None, {"every": 10}) == given
    assert WatchOptions.of(given, {"seed": 3}) == WatchOptions(every=10, seed=3)


@pytest.mark.parametrize(
    ("options", "named", "said"),
    [
        (None, {"evry": 2}, "watch() has no option 'evry'; did you mean 'every'?"),
        (WatchOptions(every=2), {"every": 2}, "got every by its name and in options"),
        (None, {"every": 0}, "every must be a whole number of steps, 1 or more, got 0"),
        (None, {"every": "10"}, "every must be a whole number of steps, 1 or more, got '10'"),
        (None, {"evidence": "no"}, "evidence must be True or False, got 'no'"),
        (None, {"overhead_budget": "1%"}, "overhead_budget must be a number of 0 or more"),
        (None, {"hang_seconds": -1}, "hang_seconds must be a number of 0 or more, got -1"),
        (None, {"parity": [1]}, "parity expected a number of steps, got [1]"),
        (None, {"process_group": "world"}, "process_group expected a group of torch.distributed"),
        (None, {"agent": "host"}, "agent must be 'process' or 'thread', got 'host'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_meant_is_refused(options, named, said):
    with pytest.raises(UsageError) as raised:
        WatchOptions.of(options, named)
    assert said in str(raised.value)


MODEL = "a model, or a list of models, and then the optimizer"
OPTIMIZER = (
    "an optimizer with param_groups, or several in a list, got {}: watch(model, optimizer, …)"
)


OTHERS = (
    "the optimizer of this model, got one that holds none of its parameters; make it from "
    "model.parameters(), after all changes of the model"
)
ENDLESS = (
    "plain values in config, got some that cannot be read (RecursionError), or that hold themselves"
)


def refused(_, folder):
    """Give arguments of other kinds than are expected."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other_model = nn.Linear(2, 3)
    other = torch.optim.SGD(other_model.parameters(), lr=0.1)
    endless: dict = {}
    endless["again"] = endless
    for wrong, words in (
        ({"model": optimizer, "optimizer": model}, f"{MODEL}, got SGD"),
        ({"model": None}, f"{MODEL}, got NoneType"),
        ({"optimizer": torch.optim.AdamW}, OPTIMIZER.format("the class AdamW")),
        ({"optimizer": "adam"}, OPTIMIZER.format("str")),
        ({"optimizer": [optimizer, schedule]}, OPTIMIZER.format("StepLR")),
        ({"optimizer": other}, OTHERS),
        ({"run_dir": None}, "run_dir to be a path, got NoneType"),
        ({"on_finding": "print"}, "on_finding to be a function of a finding, got str"),
        ({"config": "x"}, "config to map names to values, got str"),
        ({"config": endless}, ENDLESS),
    ):
        with pytest.raises(UsageError) as raised:
            watch(**{"model": model, "optimizer": optimizer, "run_dir": folder, **wrong})
        assert str(raised.value).endswith(f"watch() expected {words}")


@pytest.mark.ranks
def test_what_is_no_model_optimizer_or_path_is_refused_on_all_ranks(tmp_path):
    run_ranks(refused, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("exact", "was removed: use tier='sketch'"),
        ("all", "tier must be one of 'scalars', 'sketch', got 'all'"),
    ],
)
def test_a_tier_that_is_not_there_is_refused(tier, said):
    with pytest.raises(UsageError, match=said):
        chosen_tier(tier)


def test_what_is_read_of_the_reduced_gradient_follows_from_the_tier():
    assert [WatchOptions().reads(tier) for tier in Tier] == ["norm", "sketch"]
    assert WatchOptions(reduced="off").reads(Tier.SKETCH) == "off"
    with pytest.raises(UsageError, match="the scalars tier reads reduced='norm', got 'off'"):
        WatchOptions(reduced="off").reads(Tier.SCALARS)
