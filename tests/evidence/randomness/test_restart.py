"""Random states that a restarted job restores on other ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.randomness import KEY
from rankscope.evidence.randomness.judge import RESUMED, RandomRestart
from rankscope.evidence.randomness.probe import RandomMeter
from rankscope.record.states import pack_state, unpack_state
from support.stepping import evidence_of, words
from support.streams import gathered

W = 4
FIRST, SAVED = [1, 2, 3, 4], [11, 12, 13, 14]


def step_of(number, kind, values_W, name="numpy's"):
    row = StateDifference(kind, f"{KEY}: {name}", np.array(values_W), np.zeros(W, bool))
    return StepReport(replace(gathered(number, [[]] * W), differences=(row,)), {})


def after_restart(now_W, first_W=FIRST, saved_W=SAVED):
    before, after = RandomRestart(W), RandomRestart(W)
    assert evidence_of(before, step_of(0, StateKind.STARTED, first_W)) == []
    assert evidence_of(before, step_of(9, StateKind.SAVED, saved_W)) == []
    before.close()
    after.restore(unpack_state(pack_state(before.state())))
    return evidence_of(after, step_of(10, StateKind.STARTED, now_W))


@pytest.mark.parametrize(
    ("now_W", "ranks", "text"),
    [
        ([11, 11, 11, 11], (1, 2, 3), "ranks 1–3 hold rank 0's random state (numpy's)"),
        ([12, 11, 13, 14], (0, 1), "rank 0 holds rank 1's and rank 1 holds rank 0's random state"),
        ([7, 7, 7, 7], (0, 1, 2, 3), "ranks 0–3 hold one and the same random state"),
    ],
)
def test_a_copy_or_a_permutation_is_named(now_W, ranks, text):
    [found] = after_restart(now_W)
    assert (found.cause, found.severity, found.ranks) == (RESUMED, Severity.WARNING, ranks)
    assert text in words(found)


@pytest.mark.parametrize(
    ("now_W", "first_W", "saved_W"),
    [
        (SAVED, FIRST, SAVED),  # restored
        (FIRST, FIRST, SAVED),  # seeded as before
        ([2, 1, 3, 4], FIRST, FIRST),  # nobody draws from it
        ([5, 5, 5, 5], [5, 5, 5, 5], SAVED),  # seeded alike from the start
    ],
)
def test_other_restarts_are_healthy(now_W, first_W, saved_W):
    assert after_restart(now_W, first_W, saved_W) == []


def test_the_states_are_those_of_the_generators():
    meter = RandomMeter(torch.device("cpu"))
    before = meter.held()
    assert before == meter.held()
    torch.rand(1)
    after = meter.held()
    assert {name for name in before if before[name] != after[name]} == {"torch's on the CPU"}
