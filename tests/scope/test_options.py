"""``WatchOptions`` is the one place of the rarer options; ``watch`` takes them by name as well."""

from typing import get_type_hints

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from rankscope import WatchOptions
from rankscope.bus.plan import Tier
from rankscope.errors import UsageError
from rankscope.session.options import WatchKeywords, chosen_tier
from rankscope.wrappers.optimizers import check_optimizers


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
        (None, {"every": 0}, "every must be at least 1 step, got 0"),
        (None, {"agent": "host"}, "agent must be 'process' or 'thread', got 'host'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_meant_is_refused(options, named, said):
    with pytest.raises(UsageError) as raised:
        WatchOptions.of(options, named)
    assert said in str(raised.value)


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda optimizer: "adam", "got str"),
        (lambda optimizer: torch.optim.AdamW, "got the class AdamW"),
        (lambda optimizer: [optimizer, StepLR(optimizer, 1)], "got StepLR"),
    ],
    ids=["name", "class", "scheduler"],
)
def test_what_is_no_optimizer_is_refused(make, said):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    for given in (None, optimizer, [optimizer, optimizer]):
        check_optimizers(given)
    with pytest.raises(UsageError, match=said):
        check_optimizers(make(optimizer))
