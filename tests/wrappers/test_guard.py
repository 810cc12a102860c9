"""What the guard lets through, and the time that it counts, on a clock of its own."""

import pytest

from rankscope.wrappers import guard as guard_module
from rankscope.wrappers.guard import Guard


class Clock:
    """A clock that stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(guard_module, "time", clock)
    return clock


def fail(error=None):
    raise error or ValueError("broken")


def test_work_is_run_and_its_time_counted_until_it_is_taken(clock):
    guard = Guard(fail)
    done = []
    for seconds in (0.25, 0.5):
        guard(lambda seconds=seconds: (done.append(seconds), clock.wait(seconds)))
        clock.wait(10.0)  # the training's own time
    assert done == [0.25, 0.5]
    assert guard.take_seconds() == 0.75
    assert guard.take_seconds() == 0.0


def test_nested_work_is_counted_once(clock):
    guard = Guard(fail)

    def outer():
        clock.wait(1.0)
        guard(lambda: clock.wait(2.0))
        clock.wait(4.0)

    guard(outer)
    assert guard.take_seconds() == 7.0


def test_the_first_exception_is_told_once_and_shuts_the_guard(clock):
    told = []
    guard = Guard(told.append)
    error = ValueError("broken")
    guard(lambda: (clock.wait(0.5), fail(error)))
    assert told == [error]
    assert not guard.open
    done = []
    guard(lambda: done.append(1))
    guard(fail)
    assert done == []
    assert told == [error]
    assert guard.take_seconds() == 0.5


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_of_the_training_is_not_ours_to_keep(clock, interruption):
    told = []
    guard = Guard(told.append)
    with pytest.raises(interruption):
        guard(lambda: (clock.wait(0.5), fail(interruption())))
    assert told == []
    assert guard.open
    guard(lambda: clock.wait(0.25))
    assert guard.take_seconds() == 0.75
