"""The examples in docstrings of `stats` and `bus` run, and no estimator is without one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

from rankscope import bus, stats
from rankscope.stats.state import Stateful

MODULES = [
    module.name
    for room in (stats, bus)
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")
]

ESTIMATORS = [
    "audit",
    "bets",
    "budget",
    "consensus",
    "direction",
    "draws",
    "exchangeability",
    "noise_scale",
    "rounding",
    "spread",
    "units",
]
"""Modules of the metrics of the paper, and of statistics of ours."""

WITHOUT = {
    "audit.distinct": "bookkeeping",
    "audit.residuals": "see residuals_of_all",
    "audit.residuals_by_row": "see residuals_of_all",
    "draws.SortedMap": "a store",
    "draws.count_common": "bookkeeping",
    "draws.differs_from_previous": "bookkeeping",
    "draws.in_order": "bookkeeping",
    "units.FlaggedUnit": "see ExchangeabilityTest",
    "units.RecentSteps": "a store",
    "units.compare_with_others": "see ExchangeabilityTest",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has_an_example(name):
    lacking = {
        f"{name}.{public}"
        for public, value in vars(importlib.import_module(f"rankscope.stats.{name}")).items()
        if _is_estimator(value) and value.__module__ == f"rankscope.stats.{name}"
        if not public.startswith("_") and ">>>" not in (value.__doc__ or "")
    }
    assert lacking == {where for where in WITHOUT if where.startswith(f"{name}.")}


def _is_estimator(value) -> bool:
    """Functions, and what learns from step to step; containers and enumerations are neither."""
    function = inspect.isfunction(inspect.unwrap(value)) if callable(value) else False
    return function or (inspect.isclass(value) and issubclass(value, Stateful))
