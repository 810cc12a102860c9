"""The end of backward passes, as hooks inside them see it, in one process."""

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from rankscope.wrappers.passes import BackwardEnd


class Watched:
    """Three layers whose hooks notice the pass, and all events in the order in which they came.

    Each hook also queues a callback, as DDP does for its reduction.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.backward = BackwardEnd(
            lambda: self.events.append("begin"),
            lambda: self.events.append("end"),
            lambda work: work(),
        )
        self.layers = [torch.nn.Linear(3, 3, bias=False) for _ in range(3)]
        self.raise_in = ""
        for name, layer in zip("abc", self.layers, strict=True):
            layer.weight.register_post_accumulate_grad_hook(self._make_hook(name))

    def _make_hook(self, name):
        def hook(parameter):
            if self.raise_in == name:
                raise ValueError("out of memory")
            self.events.append(name)
            self.backward.notice()
            engine = Variable._execution_engine
            engine.queue_callback(lambda: self.events.append(f"reduced {name}"))

        return hook

    def forward(self, reentrant=()):
        hidden = torch.ones(2, 3, requires_grad=True)
        for name, layer in zip("abc", self.layers, strict=True):
            if name in reentrant:
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            else:
                hidden = layer(hidden)
        return hidden.sum()

    def step(self, **options):
        """Run a forward and a backward pass; return what happened in them, without reductions."""
        self.events.clear()
        self.backward.begin()
        self.forward(**options).backward()
        return [event for event in self.events if not event.startswith("reduced")]

    def step_seen_from_the_output(self, **options):
        """Do the same, noticed as soon as the pass begins."""
        self.events.clear()
        self.backward.begin()
        output = self.forward(**options)
        output.register_hook(lambda gradient: self.backward.notice())
        output.backward()
        return [event for event in self.events if not event.startswith("reduced")]


def test_the_end_comes_once_and_after_everything_that_others_queued():
    watched = Watched()
    for _ in range(3):
        watched.step()
        assert watched.events == [
            *("c", "begin", "b", "a", "reduced c", "reduced b", "reduced a", "end")
        ]
        assert not watched.backward.running


def test_a_pass_that_raised_runs_on_until_the_next_begins():
    watched = Watched()
    watched.raise_in = "b"
    with pytest.raises(ValueError, match="out of memory"):
        watched.step()
    assert watched.events == ["c", "begin"]
    assert watched.backward.running
    watched.raise_in = ""
    assert watched.step()[-1] == "end"
    assert watched.events.count("end") == 1
    assert not watched.backward.running


def test_a_pass_that_raised_before_any_parameter_is_seen_from_the_output_alone():
    watched = Watched()
    watched.raise_in = "c"
    for step, seen in ((watched.step, False), (watched.step_seen_from_the_output, True)):
        with pytest.raises(ValueError, match="out of memory"):
            step()
        assert watched.backward.running == seen


@pytest.mark.parametrize("reentrant", ["", "b", "ac"])
def test_seen_from_the_output_inner_passes_are_part_of_the_outer_one(reentrant):
    watched = Watched()
    for _ in range(2):
        events = watched.step_seen_from_the_output(reentrant=reentrant)
        assert events == ["begin", "c", "b", "a", "end"]
        assert not watched.backward.running
