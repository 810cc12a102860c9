import doctest
import importlib
import pkgutil

import pytest

from rankscope import bus, stats

ROOMS = [pkgutil.iter_modules(room.__path__, f"{room.__name__}.") for room in (stats, bus)]
MODULES = [module.name for room in ROOMS for module in room]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
