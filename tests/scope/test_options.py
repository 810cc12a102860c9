"""``WatchOptions`` is the one place of the rarer options; ``watch`` takes them by name as well."""

from typing import get_type_hints

import pytest

from rankscope import WatchOptions
from rankscope.bus.plan import Tier
from rankscope.errors import UsageError
from rankscope.session.options import WatchKeywords, chosen_tier


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
