"""Keeps monitor failures out of the training, and times the monitor's work on its thread.

On an accelerator, the device's own clock times it. The host runs ahead of the device, so a hook's
time there need not slow the training down: it is hidden as long as the device has work left, and a
hook that waits for room in the device's queue seems to take long. The overhead is the time between
the moments at which the device reaches the hook's beginning and its end: the hook's own kernels,
and any wait for the host.
"""

import logging
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch

from rankscope.wrappers.surroundings import outside
from rankscope.wrappers.untraced import untraced

_log = logging.getLogger("rankscope")

_TIMED_EVERY = 7
"""Steps; marks cost some microseconds each. Intervals of observed steps are powers of two."""

Marks = list[tuple[Any, Any]]


class _Marking(Enum):
    """Which of a step's work has marks.

    The end of a step moves it from NONE to PART to ALL where a timed step is near, else to NONE;
    work that must not count moves it from ALL to PART, and an error to GIVEN_UP for good.
    """

    NONE = auto()
    PART = auto()  # marking has begun within the step, or not all of the work counts
    ALL = auto()
    GIVEN_UP = auto()


class DeviceOverhead:
    """The overhead of one step; known as soon as the device has passed its last mark.

    ``marks`` are events at beginning and end of each piece of work; None in a step that is not
    timed.
    """

    def __init__(
        self, clock: "DeviceClock", marks: Marks | None, on_host: float, *, observed: bool
    ) -> None:
        self._clock = clock
        self._marks = marks
        self._on_host = on_host
        self._observed = observed

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self._marks is None or all(end.query() for _, end in self._marks)

    def read(self) -> float:
        """Return seconds; in a step that is not timed, those of the last one of its kind."""
        return self._clock.read(self._marks, self._on_host, observed=self._observed)


class DeviceClock:
    """Marks on the current stream where the monitor's work begins and ends, in some steps.

    It never raises: where events cannot be had or read, the host's clock stays. It leaves out steps
    in which a graph is captured, into which marks must not get.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        record: Callable[[Any], None],
        is_capturing: Callable[[], bool],
    ) -> None:
        self._make_event = make_event
        self._record = record
        self._is_capturing = is_capturing
        self._begun: Any = None
        self._marks: Marks = []
        self._free: list[Any] = []
        self._marking = _Marking.NONE
        self._typical: dict[bool, float] = {}

    def begin(self) -> None:
        """Note that work begins."""
        if self._marking in (_Marking.PART, _Marking.ALL):
            self._begun = self._mark()

    def end(self) -> None:
        """Note that it ends."""
        begun, self._begun = self._begun, None
        if begun is not None:
            ended = self._mark()
            if ended is not None:
                self._marks.append((begun, ended))

    def spoil(self) -> None:
        """Leave this step out: its present work is accounted for elsewhere."""
        if self._marking is _Marking.ALL:
            self._marking = _Marking.PART

    def take(self, step: int, on_host: float, *, observed: bool) -> DeviceOverhead:
        """Return a step's overhead, which took so many seconds on the host, and begin the next one.

        Work that is under way counts to the next one, and so it was marked before. ``observed``
        is whether gradients were measured in the step.
        """
        marks, self._marks = self._marks, []
        timed = step % _TIMED_EVERY == 0 and self._marking is _Marking.ALL
        if not timed:
            self._give_back(marks)
        self._marking = self._next_marking(step)
        return DeviceOverhead(self, marks if timed else None, on_host, observed=observed)

    def _next_marking(self, step: int) -> _Marking:
        """Return how the step after this one is marked."""
        if self._marking is _Marking.GIVEN_UP:
            return _Marking.GIVEN_UP
        if not any((step + later) % _TIMED_EVERY == 0 for later in (1, 2)):
            return _Marking.NONE
        return _Marking.PART if self._marking is _Marking.NONE else _Marking.ALL

    def read(self, marks: Marks | None, on_host: float, *, observed: bool) -> float:
        """Return a step's overhead in seconds; see :class:`DeviceOverhead`."""
        if marks is not None and self._marking is not _Marking.GIVEN_UP:
            try:
                seconds = sum(begin.elapsed_time(end) for begin, end in marks) / 1e3
            except Exception as error:
                self._give_up(error)
            else:
                self._typical[observed] = seconds
                self._give_back(marks)
        if self._marking is _Marking.GIVEN_UP:
            return on_host
        return self._typical.get(observed, on_host)

    def _mark(self) -> Any:
        try:
            if self._is_capturing():
                self.spoil()
                return None
            event = self._free.pop() if self._free else self._make_event()
            self._record(event)
        except Exception as error:
            self._give_up(error)
            return None
        return event

    def _give_back(self, marks: Marks) -> None:
        for pair in marks:
            self._free += pair

    def _give_up(self, error: Exception) -> None:
        if self._marking is not _Marking.GIVEN_UP:
            _log.info("the monitor's cost is taken by the host's clock: %s", error)
        self._marking = _Marking.GIVEN_UP


def clock_of(device: torch.device) -> DeviceClock | None:
    """Return the clock of an accelerator; None where the host does the work."""
    if device.type != "cuda":
        return None
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        lambda event: event.record(torch.cuda.current_stream(device)),  # not every job sets its own
        torch.cuda.is_current_stream_capturing,
    )


class Guard:
    """Runs the monitor's work on the training thread: timed, and unable to raise into it.

    It runs outside of the training's contexts (:mod:`rankscope.wrappers.surroundings`). ``failed``
    is called with the first exception; after it nothing runs any more. ``clock`` times it on an
    accelerator, too.
    """

    def __init__(
        self, failed: Callable[[Exception], None], clock: DeviceClock | None = None
    ) -> None:
        self.open = True
        self._clock = clock
        self._failed = failed
        self._seconds = 0.0
        self._depth = 0
        self._cut_short = False

    @untraced
    def __call__(self, work: Callable[..., None], *args: Any) -> None:
        """Run ``work`` with the arguments, unless the guard is shut."""
        if not self.open:
            return
        start = time.perf_counter()
        if self._clock is not None and self._depth == 0:
            self._clock.begin()
        self._depth += 1
        try:
            if self._depth == 1:
                outside(work, *args)
            else:
                work(*args)
        except Exception as error:
            self.open = False
            self._failed(error)
        except BaseException:  # Ctrl-C: the training's, wherever Python happens to raise it
            self._cut_short = True
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                if self._clock is not None:
                    self._clock.end()
                self._seconds += time.perf_counter() - start

    def leave_out(self, seconds: float) -> None:
        """Do not count part of the time, from inside of work: it is accounted for elsewhere."""
        self._seconds -= seconds
        if seconds and self._clock is not None:
            self._clock.spoil()

    def take_cut_short(self) -> bool:
        """Return whether Ctrl-C or the like has ended work halfway since the last call."""
        cut_short, self._cut_short = self._cut_short, False
        return cut_short

    def take_seconds(self) -> float:
        """Return the time that work has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_device_overhead(
        self, step: int, on_host: float, *, observed: bool
    ) -> DeviceOverhead | None:
        """Return a step's overhead on an accelerator, see :meth:`DeviceClock.take`."""
        return None if self._clock is None else self._clock.take(step, on_host, observed=observed)
