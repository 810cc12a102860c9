"""When the local gradients of a backward pass are read: in hooks, or together at its end."""

import pytest
import torch

from rankscope.bus.groups import group_parameters
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.ddp_reading import LocalReading

NAMES = ("a.x", "a.y", "b.z")
CPU = torch.device("cpu")
LEARNT_IN = 2


class Observer:
    def __init__(self, wanted_names):
        self.wanted_names = wanted_names
        self.seen = []

    def see_local(self, name, gradient):
        self.seen.append((name, float(gradient.sum())))

    def see_locals(self, gradients):
        for name, gradient in gradients:
            self.see_local(name, gradient)

    def see_reduced(self):
        pass


class Pass:
    """Backward passes over three parameters, as DDP's hooks would show them."""

    def __init__(self, *, in_buckets=False, wants=()):
        self.parameters = {name: torch.zeros(4, requires_grad=True) for name in NAMES}
        self.observer = Observer(wants)
        self.sketcher = Sketcher(CPU, group_parameters(NAMES, lambda name: name), 61)
        self.calls = []
        measure = self.sketcher._measure

        def count(names, *args, **options):
            self.calls.append(list(names))
            measure(names, *args, **options)

        self.sketcher._measure = count
        self.reading = LocalReading(
            self.parameters, self.sketcher, self.observer, in_buckets=in_buckets
        )

    def run(
        self,
        *,
        measure=True,
        synchronises=True,
        used=NAMES,
        before_hook=None,
        after_hook=None,
        at_end=None,
        zero=(),
    ):
        """Return whose hooks only counted, and what was measured.

        ``zero`` tells whose gradients are zeroed in place, for the pass to be added to.
        """
        self.calls.clear()
        self.observer.seen.clear()
        for name, parameter in self.parameters.items():
            parameter.grad = parameter.grad.zero_() if name in zero else None
        first, counted = True, []
        for number, name in enumerate(used):
            parameter = self.parameters[name]
            gradient = torch.full((4,), float(number + 1))
            parameter.grad = parameter.grad.add_(gradient) if name in zero else gradient
            if before_hook is not None:
                before_hook(name, parameter)
            if first:
                self.reading.begin_pass(name, measure=measure, synchronises=synchronises)
                self.held = self.reading.begin_step(name)
                first = False
            if name in self.reading.late:
                counted.append(name)
            else:
                self.reading.take(name, parameter.grad)
            if after_hook is not None:
                after_hook(name, parameter)
        if at_end is not None:
            at_end()
        self.reading.end_pass(used)
        return counted, self.reading.totals.largest.tolist()

    def learn(self, **options):
        for _ in range(LEARNT_IN):
            assert self.run(**options) == ([], [1.0, 2.0, 3.0])


def test_once_they_are_known_to_last_all_are_read_in_one_call():
    passes = Pass()
    passes.learn()
    assert passes.run() == (["a.y", "b.z"], [1.0, 2.0, 3.0])
    assert passes.calls == [list(NAMES)]
    assert not passes.reading.spoiled
    assert passes.run(used=NAMES[1:]) == (["b.z"], [0.0, 1.0, 2.0])
    assert passes.calls == [list(NAMES[1:])]


def scale(name, parameter):
    if name == "a.y":
        parameter.grad.mul_(10)


def take_away(name, parameter):
    if name == "a.y":
        parameter.grad = None


@pytest.mark.parametrize("change", [scale, take_away])
def test_one_that_is_changed_after_its_hook_is_read_in_its_hook(change):
    passes = Pass()
    passes.learn(after_hook=change)
    counted, largest = passes.run(after_hook=change)
    assert counted == ["b.z"]
    assert largest == [1.0, 2.0, 3.0]
    assert not passes.reading.spoiled


@pytest.mark.parametrize("in_hooks", [True, False])
def test_a_pass_that_is_unlike_others_is_spoiled_and_hooks_read_from_then_on(in_hooks):
    """Another way of ending a backward pass, or an optimizer in a hook since then."""
    passes = Pass()
    passes.learn()

    def reduce():
        for parameter in passes.parameters.values():
            parameter.grad.mul_(0.5)

    passes.run(**({"after_hook": take_away} if in_hooks else {"at_end": reduce}))
    assert passes.reading.spoiled
    for _ in range(3):
        assert passes.run() == ([], [1.0, 2.0, 3.0])
        assert not passes.reading.spoiled


def move_to_bucket(name, parameter):
    parameter.grad = parameter.grad / 3


def test_with_bucket_views_new_gradients_are_kept_until_they_are_read_together():
    passes = Pass(in_buckets=True)
    for _ in range(4):
        assert passes.run(after_hook=move_to_bucket) == ([], [1.0, 2.0, 3.0])
        assert passes.calls == [["a.x"], ["a.y", "b.z"]]  # the first is not known to be new
        assert passes.reading._kept == []


def test_no_more_than_some_megabytes_are_kept(monkeypatch):
    monkeypatch.setattr("rankscope.wrappers.ddp_reading._KEPT_BYTES", 16)
    passes = Pass(in_buckets=True)
    passes.run(after_hook=move_to_bucket)
    assert passes.calls == [["a.x"], ["a.y"], ["b.z"]]


def test_a_pass_that_never_ended_leaves_nothing():
    passes = Pass(in_buckets=True)
    passes.run()
    passes.parameters["a.x"].grad = torch.ones(4)
    passes.reading.begin_pass("a.x", measure=True, synchronises=True)
    passes.reading.take("a.x", torch.full((4,), 7.0))
    passes.reading.forget()
    assert passes.reading.late == ()
    assert passes.run()[1] == [1.0, 2.0, 3.0]


def test_where_a_hook_of_the_training_changes_each_fifth_gradient_one_pass_is_lost():
    passes = Pass()

    def run(step):
        hooked = step % 5 == 0  # its gradient is a copy that was changed: of another version
        at_hook = (lambda name, parameter: parameter.grad.add_(1)) if hooked else None
        passes.run(before_hook=at_hook)
        return passes.reading.spoiled

    assert [step for step in range(1, 60) if run(step)] == [10]
