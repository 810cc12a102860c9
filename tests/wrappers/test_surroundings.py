"""What surrounds the training's call is left for our work, and comes back exactly."""

import contextlib

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from rankscope.wrappers.surroundings import outside, surrounded
from support.cut import Cut


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Hearing(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Within:
    """Several of everything, two of them the same twice."""

    def __enter__(self):
        self.packed = []

        def pack(tensor):
            self.packed.append(tensor)
            return tensor

        hooks = saved_tensors_hooks(pack, lambda packed: packed)
        self.modes = Seeing(), Seeing()
        self.functions = Hearing(), Hearing()
        self._stack = contextlib.ExitStack()
        device = torch.device("cpu")
        for one in (save_on_cpu(), hooks, hooks, *self.modes, device, *self.functions):
            self._stack.enter_context(one)
        self._stack.enter_context(torch.inference_mode())
        return self

    def __exit__(self, *_):
        self._stack.close()

    @property
    def seen(self):
        return [len(self.packed), *(len(one.seen) for one in (*self.modes, *self.functions))]


def state():
    """Return what is in force, the hooks from the top down."""
    autograd, hooks = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    count = torch._C._len_torch_function_stack()
    return [
        hooks,
        _get_current_dispatch_mode_stack(),
        [torch._C._get_function_stack_at(place) for place in range(count)],
        torch.is_inference_mode_enabled(),
    ]


def work():
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_all_comes_back_wherever_it_is_interrupted():
    with Within(), Cut(file="wrappers/surroundings") as count:
        outside(work)
    assert count.count > 50
    for at in range(count.count):
        with Within():
            before = state()
            with pytest.raises(KeyboardInterrupt), Cut(at, file="wrappers/surroundings"):
                outside(work)
            assert state() == before, at
        assert not surrounded(), at
