"""State that moves between the forward passes of a step."""

import torch
from torch import nn

from rankscope.bus.finding import Severity
from rankscope.bus.probe import StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.evidence.state.judge import FROZEN_MOVES, OTHERS_MOVE, MovesInPasses
from rankscope.evidence.state.probe import PassMeter
from rankscope.evidence.state.roles import numbered
from support.stepping import evidence_of

from .test_unequal import difference, step


class Averaged(nn.Module):
    """A model with an average, a centre, a counter, and statistics of torch's own."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        self.centre.lerp_(x.mean(0), 0.1)
        return self.spectral(self.norm(self.student(x)))

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.1)


def moved(*, in_forward, passes, steps=24):
    """Return the changes of a step by name, over steps in which the student moves as well."""
    torch.manual_seed(0)
    model = Averaged()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.1)
    meter = PassMeter(model)
    found = {}
    for _ in range(steps):
        for number in range(passes):
            meter.before_forward(0, first=number == 0)
            if in_forward:
                model.follow()
            model(torch.randn(3, 4)).square().mean().backward()
        meter.before_update()
        optimizer.step()
        if not in_forward:
            model.follow()
        pending = meter.collect(StepEnd(0, comparable=True, idle=frozenset(), num_passes=1))
        for name, changes, frozen in pending.read().names.get("passes", ()) if pending else ():
            found[name] = changes, frozen
    return found


def test_what_moves_in_the_forward_pass_is_counted():
    teacher = {f"teacher.{name}": (4, True) for name in ("weight", "bias")}
    assert moved(in_forward=True, passes=4) == {**teacher, "centre": (4, False)}
    assert moved(in_forward=False, passes=4) == {"centre": (4, False)}
    assert moved(in_forward=True, passes=1) == {}


def test_frozen_parameters_are_a_warning_and_others_a_note():
    sent = [[("teacher.weight", 4, True), ("centre", 4, False)], []]
    found = numbered(StateKind.PASSES, sent)
    named = [(d.kind, d.name, d.digests_W.tolist()) for d in found]
    assert named == [(StateKind.PASSES, name, [4, 0]) for name in ("teacher.weight", "centre")]
    frozen = difference("passes", [4, 4, 4, 4], name="teacher.weight", unchanged=range(4))
    once = difference("passes", [1, 1, 1, 1], name="other", unchanged=range(4))
    centre = difference("passes", [4, 4, 4, 4], name="centre")
    detector = MovesInPasses()
    told = [e for n in range(5) for e in evidence_of(detector, step(n, frozen, once, centre))]
    assert {(e.key, e.severity, e.fields["names"]) for e in told} == {
        (FROZEN_MOVES, Severity.WARNING, "teacher.weight"),
        (OTHERS_MOVE, Severity.NOTE, "centre"),
    }
    assert min(e.last_step for e in told) == 2
    assert evidence_of(MovesInPasses(), *(step(n, once) for n in range(9))) == []
