"""Learning rates whose schedule moves too fast, or is over too early."""

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.environment.settings import (
    BY_PASS,
    ENDED,
    JUMPS,
    ScheduleByPass,
    ScheduleEnded,
    ScheduleJump,
)
from support.stepping import observe, run, words


def test_a_schedule_that_moves_with_micro_batches_is_a_note():
    often = {"micro_batches": [4, 4], "lr_changes": [3, 3]}
    told = run(ScheduleByPass(), 8, width=2, **often)
    assert [(one.key, one.severity, one.count) for one in told] == [(BY_PASS, Severity.NOTE, 8)]
    assert "moves 4 times in an update" in words(told[0])
    for columns in (
        {"micro_batches": [1, 1], "lr_changes": [0, 0]},
        {**often, "lr_changes": [0, 0]},
    ):
        assert run(ScheduleByPass(), 20, width=2, **columns) == []


def follow(rates, detector=None, calls=1):
    """Return the evidence on steps with these learning rates."""
    detector = detector or ScheduleEnded()
    found = []
    for step, rate in enumerate(rates):
        found += observe(detector, step, lr=[rate] * 2, optimizer_steps=[calls] * 2, width=2)
    return found


def down(steps, end, peak=3e-3):
    return np.linspace(peak, end, steps).tolist()


@pytest.mark.parametrize(
    ("rates", "severity", "last"),
    [
        (down(41, 3e-5) + [3e-5] * 60, Severity.NOTE, 71),
        (down(201, 0.0) + [0.0] * 60, Severity.WARNING, 231),
    ],
)
def test_a_rate_that_rests_at_the_end_of_its_schedule(rates, severity, last):
    [found] = follow(rates)
    assert (found.key, found.severity, found.last_step) == (ENDED, severity, last)
    assert found.first_step == rates.index(rates[-1])
    assert ("has been 0" in words(found)) == (severity is Severity.WARNING)


@pytest.mark.parametrize(
    "rates",
    [
        down(40, 1e-3, peak=0.0) + [1e-3] * 400,  # a warm-up
        down(40, 1e-3, peak=0.0) + [1e-3] * 30 + [1e-4] * 30 + [1e-5] * 400,  # three rates
        down(40, 1e-3) + [1e-3] * 400,  # a third of the peak
        down(201, 3e-5) + [3e-5] * 100,
    ],
)
def test_other_schedules_are_silent(rates):
    assert follow(rates) == []


def after_restart(before, after):
    first, second = ScheduleJump(), ScheduleJump()
    assert follow(before, first) == []
    second.restore(first.state())
    return follow(after, second)


def test_a_rate_that_jumps_at_a_restart():
    [found] = after_restart(down(70, 2e-3), [8e-4, 7.9e-4])
    assert (found.key, found.severity, found.first_step) == (JUMPS, Severity.NOTE, 0)
    assert "jumps from 0.002 to 0.0008 at the restart" in words(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (down(70, 2e-3), [2.2e-3]),  # of a checkpoint some steps before
        ([1e-3] * 3, [1e-4]),  # too short to know
    ],
)
def test_a_rate_that_goes_on_is_silent(before, after):
    assert after_restart(before, after) == []
    assert follow([*before, *after], ScheduleJump()) == []
