"""``WatchOptions`` is the one place of the rarer options; ``watch`` takes them by name as well."""

import dataclasses
import inspect
from typing import get_type_hints

import pytest

import rankscope
from rankscope import WatchOptions
from rankscope.bus.plan import Tier
from rankscope.errors import UsageError
from rankscope.session.options import WatchKeywords

FIELDS = {field.name for field in dataclasses.fields(WatchOptions)}


def test_watch_itself_has_the_everyday_options_alone():
    parameters = inspect.signature(rankscope.watch).parameters.values()
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(named - {"options"}) <= 8
    assert named & FIELDS == set()


def test_editors_and_type_checkers_know_every_option():
    assert get_type_hints(WatchKeywords) == get_type_hints(WatchOptions)


def test_every_option_is_explained():
    explained = WatchOptions.__doc__ or ""
    assert [name for name in FIELDS if f"\n        {name}: " not in explained] == []


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
        (None, {"sink": ["jsonl"]}, "watch() has no option 'sink'; did you mean 'sinks'?"),
        (None, {"colour": 1}, "watch() has no option 'colour', only run_dir, tier, plan, "),
        (WatchOptions(every=2), {"every": 2}, "got every by its name and in options"),
        (None, {"every": 0}, "every must be at least 1 step, got 0"),
        (None, {"reduced": "mean"}, "reduced must be one of 'off', 'norm', 'sketch', got 'mean'"),
        (None, {"agent": "host"}, "agent must be 'process' or 'thread', got 'host'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_meant_is_refused(options, named, said):
    with pytest.raises(UsageError) as raised:
        WatchOptions.of(options, named)
    assert said in str(raised.value)


def test_what_is_read_of_the_reduced_gradient_follows_from_the_tier():
    assert [WatchOptions().reads(tier) for tier in Tier] == ["norm", "sketch"]
    assert WatchOptions(reduced="off").reads(Tier.SKETCH) == "off"
    with pytest.raises(UsageError, match="the scalars tier reads reduced='norm', got 'off'"):
        WatchOptions(reduced="off").reads(Tier.SCALARS)


def test_what_is_compared_is_plain():
    compared = WatchOptions(process_group=object(), tokenizer=object()).compared()
    assert compared.keys() < FIELDS
    assert all(isinstance(value, int | float | None) for value in compared.values())
