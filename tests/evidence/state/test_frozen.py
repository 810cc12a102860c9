"""Frozen modules outside of the wrapped model, on real ranks."""

import copy

import pytest
import torch
from torch import nn

from rankscope import Run
from rankscope.bus.finding import Severity
from rankscope.evidence.state.judge import FROZEN_DIFFER
from rankscope.wrappers.living import frozen_modules, living_modules
from support.loops import Loop
from support.ranks import run_ranks

STEPS = 4


def make_teacher(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)


def train(rank, folder):
    """Train with two teachers of one class, of which one is the same on all ranks."""
    for name, seed in {"healthy": 7, "faulty": 7 + rank}.items():
        loop = Loop(rank, f"{folder}/{name}")
        teachers = [make_teacher(seed), make_teacher(3)]
        alone = nn.Linear(rank + 2, 2).requires_grad_(False)  # of another size on each rank
        student = copy.deepcopy(loop.model)  # on all of them, and trained
        for step in range(STEPS):
            loop.step(step)
        loop.close()
        del teachers, alone, student


@pytest.mark.ranks
def test_a_frozen_module_that_differs_is_a_warning_that_names_it(tmp_path):
    run_ranks(train, 3, str(tmp_path))
    healthy, faulty = (list(Run.open(tmp_path / n).findings()) for n in ("healthy", "faulty"))
    assert [f.cause for f in healthy if f.severity > Severity.NOTE] == []
    [found] = [f for f in faulty if f.severity > Severity.NOTE]
    assert (found.cause, found.severity, found.ranks) == (
        FROZEN_DIFFER,
        Severity.WARNING,
        (0, 1, 2),
    )
    assert "Sequential (84 elements)" in found.explanation


def test_only_outermost_modules_of_ordinary_frozen_tensors_count():
    teacher, trained = make_teacher(0), nn.Linear(2, 2)
    holder = nn.ModuleList([trained, teacher])
    meta = nn.Linear(2, 2, device="meta").requires_grad_(False)
    ours = {id(each) for each in (teacher, *teacher, trained, holder, meta)}
    assert [id(m) for m in frozen_modules(living_modules(set())) if id(m) in ours] == [id(teacher)]
    inside = {id(part) for part in teacher.modules()}
    assert [id(m) for m in frozen_modules(living_modules(inside)) if id(m) in ours] == []
