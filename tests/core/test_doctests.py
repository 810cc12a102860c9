"""The examples in docstrings of `core` run, and no metric or estimator is without one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

from rankscope import core
from rankscope.stats.state import Stateful

MODULES = sorted(module.name for module in pkgutil.iter_modules(core.__path__))

ESTIMATORS = [
    "audit",
    "bets",
    "block_ratio",
    "budget",
    "consensus",
    "direction",
    "dispersion",
    "exchangeability",
    "noise_scale",
    "permutation",
    "recent",
    "rounding",
    "share",
    "weighting",
]
"""Modules of the metrics of the paper, and of statistics of ours."""

WITHOUT = {
    "audit.distinct": "bookkeeping",
    "audit.residuals": "see residuals_of_all",
    "audit.residuals_by_row": "see residuals_of_all",
    "recent.RecentSteps": "a store",
    "weighting.common_scale": "takes a whole step",
    "weighting.undo_common_scale": "takes a whole step",
}


def module_of(name: str):
    return importlib.import_module(f"rankscope.core.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, _ = doctest.testmod(module_of(name))
    assert not failed


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has_an_example(name):
    lacking = {
        f"{name}.{public}"
        for public, value in vars(module_of(name)).items()
        if _is_estimator(value) and value.__module__ == f"rankscope.core.{name}"
        if not public.startswith("_") and ">>>" not in (value.__doc__ or "")
    }
    assert lacking == {where for where in WITHOUT if where.startswith(f"{name}.")}


def _is_estimator(value) -> bool:
    """Functions, and what learns from step to step; containers and enumerations are neither."""
    function = inspect.isfunction(inspect.unwrap(value)) if callable(value) else False
    return function or (inspect.isclass(value) and issubclass(value, Stateful))
