import contextlib
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from rankscope.wrappers.ddp_model import JointModel
from rankscope.wrappers.guard import DeviceClock, Guard
from rankscope.wrappers.living import live_objects, one_walk
from rankscope.wrappers.passes import ForwardPasses, tensors_in
from rankscope.wrappers.surroundings import outside, surrounded
from support.cut import Cut

# What a training on an accelerator loses to the monitor, on a device that is played -------------


class Device:
    """A host and a device that works off, in order, what the host has queued; in milliseconds."""

    def __init__(self):
        self.now = self.done = 0.0

    def work_on_host(self, milliseconds):
        self.now += milliseconds

    def launch(self, milliseconds):
        self.done = max(self.now, self.done) + milliseconds

    def event(self):
        return Event(self)

    def wait(self):
        self.now = max(self.now, self.done)


class Event:
    def __init__(self, device):
        self.device, self.time = device, None

    def record(self):
        self.time = max(self.device.now, self.device.done)

    def query(self):
        return self.time <= self.device.now

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "the device has not come so far"
        return end.time - self.time


def train(steps, *, host, kernels, own_host, own_kernels, spoilt=()):
    device, step = Device(), 0
    clock = DeviceClock(device.event, Event.record, lambda: False)
    guard = Guard(pytest.fail, clock)
    taken, lost = [], []

    def hook():
        taken.append(guard.take_device_overhead(step, 99.0, observed=step % 2 == 0))
        if step in spoilt:
            guard.leave_out(0.5)
        device.work_on_host(own_host)
        device.launch(own_kernels * (step % 2 + 1))

    for step in range(steps):  # noqa: B007
        device.work_on_host(host)
        device.launch(kernels)
        guard(hook)
    device.wait()
    for felt in taken:
        assert felt.ready
        lost.append(felt.read())
    return lost


def test_work_is_hidden_while_the_device_has_work_left():
    lost = train(40, host=1, kernels=20, own_host=5, own_kernels=2)
    # The work in step 6 counts to step 7, which is not observed; that in 13 to 14, which is.
    assert lost[:7] == [99.0] * 7
    assert lost[7] == pytest.approx(0.002)
    assert lost[9] == pytest.approx(0.002)  # one of its kind
    assert lost[8] == 99.0  # nothing is known of its kind yet
    assert lost[14] == lost[16] == pytest.approx(0.004)


def test_a_step_that_does_more_is_left_out():
    lost = train(40, host=1, kernels=20, own_host=5, own_kernels=2, spoilt=(6,))
    assert lost[7] == 99.0
    assert lost[21] == pytest.approx(0.002)


# Objects are found while other threads go on ----------------------------------------------------


class Marked:
    pass


class More(Marked):
    pass


class Other(More):
    pass


def test_objects_are_found_by_class_and_by_the_first_class_that_is_asked_for():
    marked, more, other = Marked(), More(), Other()
    assert set(map(id, live_objects(Marked)[Marked])) == {id(marked), id(more), id(other)}
    found = live_objects(Other, Marked)
    assert found[Other] == [other]
    assert set(map(id, found[Marked])) == {id(marked), id(more)}


def test_one_walk_serves_all_that_ask_for_what_trainings_have():
    module = nn.Identity()
    with one_walk(), one_walk():
        found = live_objects(nn.Module)[nn.Module]
        assert any(one is module for one in found)
        marked = Marked()
        assert live_objects(nn.Module)[nn.Module] is found
        assert live_objects(Marked)[Marked] == [marked]
    assert live_objects(nn.Module)[nn.Module] is not found


def test_tuples_that_another_thread_builds_are_left_alone():
    marked, stop, errors, built = Marked(), threading.Event(), [], []

    def build():
        while not stop.is_set():
            try:
                built.append(len(tuple(number for number in range(2000))))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(5):
            assert live_objects(Marked)[Marked] == [marked]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert built


# Forward passes that take part in a step, and those that do not, in one process -----------------


def test_what_cannot_be_seen_is_taken_to_take_part():
    passes = ForwardPasses(lambda trained: trained(), lambda work, *args: work(*args))
    for output in (None, torch.zeros(2), object()):
        passes.begin()
        passes.end(output)
    assert passes.take_idle() == frozenset()


def test_tensors_without_a_graph_are_no_output_that_a_loss_can_come_from():
    passes = ForwardPasses(lambda trained: trained(), lambda work, *args: work(*args))
    graph = torch.ones(2, requires_grad=True) * 2
    for output in (torch.zeros(2), (torch.zeros(2), graph), None, {"ids": torch.zeros(2)}):
        passes.begin()
        passes.end(output)
    passes.begin()
    passes.train()  # inside of the forward pass, which returns the loss without its graph
    passes.end(torch.zeros(()))
    with torch.no_grad():  # the gradient is an estimate from losses alone
        passes.begin()
        passes.end(torch.zeros(()))
    assert passes.graphless == {0, 3}


@dataclass
class Output:
    loss: torch.Tensor
    rest: object


def test_tensors_are_found_in_what_models_return():
    one, two, three = torch.zeros(3)
    output = Output(one, {"a": [two, (three,)], "b": 3, "c": range(3)})
    assert [t.data_ptr() for t in tensors_in(output)] == [t.data_ptr() for t in (one, two, three)]
    endless = []
    endless.append(endless)
    assert list(tensors_in(endless)) == []
    assert list(tensors_in([0] * 10**6 + [one])) == []  # not at any price


# What surrounds the training's call is left for our work, and comes back exactly ----------------


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


def test_parts_of_one_class_have_the_names_of_the_script_s_variables(monkeypatch):
    parts = [nn.DataParallel(nn.Linear(2, 2)), nn.DataParallel(nn.Linear(2, 1))]
    for names in (["Linear0", "Linear1"], ["generator", "critic"]):
        assert [name for name, _ in JointModel(parts).named_wrappers] == names
        monkeypatch.setattr(sys.modules["__main__"], "generator", parts[0].module, raising=False)
        monkeypatch.setattr(sys.modules["__main__"], "critic", parts[1], raising=False)
