"""The adapters for Hugging Face's packages without these packages, and what they rely on."""

import importlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankscope.errors import MissingExtraError, install_command
from rankscope.evidence.environment.training import sampler_seed
from rankscope.wrappers.find import plain_optimizer


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, package):
    module = f"rankscope.integrations.{package}"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingExtraError, match=re.escape(install_command(package))):
        importlib.import_module(module)


class Passing(torch.optim.Optimizer):
    """Passes calls on, as accelerate's does, and was never made an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_the_optimizer_inside_a_wrapper_is_found():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert plain_optimizer(optimizer) is optimizer
    assert plain_optimizer(Passing(Passing(optimizer))) is optimizer
    assert plain_optimizer(Passing(SimpleNamespace(optimizer=optimizer))) is None
    assert plain_optimizer(None) is None


def test_the_seed_of_a_loader_whose_batches_are_shared_out_is_found():
    batches = SimpleNamespace(sampler=SimpleNamespace(initial_seed=9))
    loader = SimpleNamespace(sampler=None, batch_sampler=SimpleNamespace(batch_sampler=batches))
    assert sampler_seed(loader) == 9
    loader.synchronized_generator = torch.Generator()  # each pass begins with rank 0's
    assert sampler_seed(loader) is None
