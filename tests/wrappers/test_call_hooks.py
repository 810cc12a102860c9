"""Functions around the calls of a module: eager, compiled, in place, copied, removed."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from rankscope.wrappers.call_hooks import ModuleHook


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.inner(inputs)


class Seen(list):
    """The calls that a pair has seen, by words."""

    def __init__(self, name=""):
        super().__init__()
        self.name = name
        self.pair = None

    def hook(self, module):
        self.pair = ModuleHook(module, self.before, self.after)
        return self

    def before(self, module, args, kwargs):
        self.append(f"{self.name}before {len(args)}")

    def after(self, module, args, kwargs, output):
        self.append(f"{self.name}after {tuple(output.shape)}")


INPUTS = torch.ones(3, 2)
ONE = ["before 1", "after (3, 2)"]


@pytest.fixture(autouse=True)
def clean():
    gc.collect()  # scopes of other tests
    before = vars(nn.Module)["compile"], vars(OptimizedModule)["__call__"]
    torch._dynamo.reset()
    yield
    gc.collect()
    assert (vars(nn.Module)["compile"], vars(OptimizedModule)["__call__"]) == before


def in_place(module):
    module.compile(backend="eager")
    return module


def around(module):
    return torch.compile(module, backend="eager", fullgraph=True)


@pytest.mark.parametrize(
    ("compiled", "first", "kind"),
    [
        (in_place, False, Net),
        (around, True, Net),
        (around, False, lambda: nn.Sequential(nn.Linear(2, 2))),
    ],
)
def test_each_call_is_seen_once_however_it_is_compiled(compiled, first, kind):
    net = kind()
    if first:
        called = compiled(net)
        called(INPUTS)
        seen = Seen().hook(net)
    else:
        seen = Seen().hook(net)
        called = compiled(net)
    for _ in range(2):
        called(INPUTS)
    assert seen == 2 * ONE
    seen.pair.remove()
    called(INPUTS)
    assert seen == 2 * ONE
    assert not net._forward_pre_hooks
    assert not net._forward_hooks


def test_inside_of_a_compiled_call_no_hook_runs_and_all_are_back_after_it():
    net = Net()
    outer, inner = Seen().hook(net), Seen("inner ").hook(net.inner)
    called = around(net)
    called(INPUTS)
    assert (outer, inner) == (ONE, [])
    net(INPUTS)
    assert (outer, inner) == (2 * ONE, ["inner before 1", "inner after (3, 2)"])
    outer.pair.remove()
    inner.pair.remove()


def test_hooks_are_back_after_a_compiled_call_that_raises():
    net = Net()
    seen = Seen().hook(net)
    called = around(net)
    with pytest.raises(Exception, match=r"size|shape|dim"):
        called(torch.ones(3, 5))
    net(INPUTS)
    assert seen == ["before 1", *ONE]
    seen.pair.remove()


def test_a_module_is_not_kept_by_its_hooks():
    net = Net()
    seen = Seen().hook(net)
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None
    seen.pair.remove()
