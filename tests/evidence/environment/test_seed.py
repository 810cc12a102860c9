"""Samplers that shuffle with another seed than the planned one."""

import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.environment.settings import PlannedSeed
from support.stepping import observe, words


@pytest.mark.parametrize(
    ("planned", "seeds"),
    [(42, (42, 42)), (None, (0, 0)), (42, (None, None))],
    ids=["as planned", "no plan", "unknown seeds"],
)
def test_nothing_is_said_without_a_difference(planned, seeds):
    detector = PlannedSeed(planned, seeds)
    assert [observe(detector, step) for step in range(3)] == [[], [], []]


def test_another_seed_is_told_once_with_both_numbers():
    detector = PlannedSeed(42, (0, 0, 0))
    (told,) = observe(detector, 7)
    assert (told.cause, told.key) == ("state.schedule", "seed-not-planned")
    assert (told.severity, told.ranks, told.first_step) == (Severity.WARNING, (0, 1, 2), 7)
    assert "shuffles with seed 0, and the plan declares 42" in words(told)
    assert "DistributedSampler" in words(told)
    assert observe(detector, 8) == []
