"""A last sign of life of every rank in the job's store, so that a hang names who it waits for.

When one rank stops, all others wait in a collective and know nothing. The store (torch's
``TCPStore`` or ``FileStore``) still answers. A thread in every rank writes there every few seconds
what the training does; when a rank's own step does not end, it reads what all the others wrote.

The training thread only sets an attribute. The store is used by that thread alone and through a
client of its own: a ``TCPStore`` client serves one call at a time, so a training that waits for a
key would hold up the heartbeat at the very moment that matters. No call here waits for a key.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

import torch.distributed as dist

from rankscope.core.hang import STARTING, STOPPED, Beat, HangReport, compare_beats

_log = logging.getLogger("rankscope")

Phase = Literal["forward", "backward", "step"]

NUM_READERS = 8
"""How many ranks, spread evenly, read all beats in a hang. All would be W² reads of one server."""

_SILENT_INTERVALS = 3
_STORE_SECONDS = 10.0
_FEWEST_STEPS = 3
_SLOW_STEPS = 20  # median step times that a step may take before it counts as a hang


class Store(Protocol):
    """What the heartbeat needs of a store of torch's."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""

    def check(self, keys: list[str]) -> bool:
        """Return at once whether all keys exist."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values; does not wait for keys that exist."""


class _Position(NamedTuple):
    """Where the training thread is; replaced as a whole, so that no lock is needed."""

    step: int
    passes: int
    phase: str
    since: float
    step_began: float


class Heartbeat:
    """Writes this rank's beats, and reports a hang once and its end once.

    Args:
        store: A store of which nobody else uses this client; see :func:`default_store`.
        rank: This worker's rank.
        num_workers: How many workers write beats.
        interval_seconds: Time between two beats.
        hang_seconds: How long a step may take; 20 typical steps if that is more.
        on_hang: Called in a thread of the heartbeat's.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_workers: int,
        *,
        interval_seconds: float = 5.0,
        hang_seconds: float = 120.0,
        on_hang: Callable[[HangReport], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_workers = num_workers
        self._interval = interval_seconds
        self._on_hang = on_hang
        self._reads = rank % -(-num_workers // NUM_READERS) == 0
        self._position = _Position(-1, 0, STARTING, time.time(), time.monotonic())
        self._count = 0
        self._watch = StallWatch(num_workers, interval_seconds, hang_seconds)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankscope-heartbeat", daemon=True)
        # A daemon thread that comes back from the store while Python shuts down aborts the process.
        atexit.register(self.stop)
        self._thread.start()

    def beat(self, step: int, phase: Phase) -> None:
        """Note where the training is; for the training thread, at a cost of a microsecond.

        Args:
            step: The current step.
            phase: ``"forward"`` and ``"backward"`` as these passes begin, ``"step"`` as the
                backward pass has ended.
        """
        last = self._position
        if step == last.step:
            passes, step_began = last.passes + 1, last.step_began
        else:
            passes, step_began = 1, time.monotonic()
        self._position = _Position(step, passes, phase, time.time(), step_began)

    def stop(self, timeout: float = 1.0) -> None:
        """Write a last beat that says so, and end; waits no longer than ``timeout`` seconds.

        It may be called again, and from any thread but the heartbeat's.
        """
        self._stopping.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():  # else the end of the process waits for it again
            atexit.unregister(self.stop)

    # In the heartbeat's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write(self._position)
            while not self._stopping.wait(self._interval):
                position = self._position
                own = self._write(position)
                if self._reads:
                    now = time.monotonic()
                    self._tell(self._watch.look(own, position.step_began, now, self._read))
            self._write(self._position._replace(phase=STOPPED, since=time.time()))
        except Exception as error:
            _log.debug("the heartbeat of rank %d has ended: %s", self._rank, error)

    def _write(self, position: _Position) -> Beat:
        self._count += 1
        step, passes, phase, since, _ = position
        own = Beat(self._rank, self._count, time.time(), step, passes, phase, since)
        self._store.set(_key(self._rank), own.to_bytes())
        return own

    def _tell(self, report: HangReport | None) -> None:
        try:
            if report is not None:
                self._on_hang(report)
        except Exception:
            _log.exception("on_hang raised; training and heartbeat go on")

    def _read(self) -> dict[int, Beat]:
        """Return the last beat of every rank that has written one."""
        ranks = list(range(self._num_workers))
        if not self._store.check([_key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([_key(rank)])]
        values = self._store.multi_get([_key(rank) for rank in ranks])
        return {
            rank: Beat.from_bytes(rank, value) for rank, value in zip(ranks, values, strict=True)
        }


class StallWatch:
    """Decides when a step takes too long, and reports once that it does and once that it ended.

    Args:
        num_workers: How many workers write beats.
        interval_seconds: Time between two beats.
        hang_seconds: How long a step may take; 20 typical steps if that is more.
    """

    def __init__(self, num_workers: int, interval_seconds: float, hang_seconds: float) -> None:
        self._num_workers = num_workers
        self._listening_seconds = _SILENT_INTERVALS * interval_seconds
        self._hang_seconds = hang_seconds
        self._last = (-1, 0.0)
        self._step_seconds: deque[float] = deque(maxlen=32)
        self._earlier: tuple[float, dict[int, Beat]] | None = None
        self._hang: tuple[float, HangReport] | None = None

    def look(
        self, own: Beat, step_began: float, now: float, read: Callable[[], dict[int, Beat]]
    ) -> HangReport | None:
        """See whether this rank's step has ended; once an interval.

        Args:
            own: This rank's beat.
            step_began: When its step began, by the clock of ``now``.
            now: Seconds by a clock that never jumps.
            read: Returns the beats of all ranks.

        Returns:
            A report when a hang begins or ends.
        """
        self._note_pace(own.step, step_began)
        limit = self._limit()
        if self._hang is not None:
            return self._recovery(own.step, step_began)
        if own.step < 0 or now - step_began < limit - self._listening_seconds:
            self._earlier = None
        elif self._earlier is None:
            self._earlier = (now, read())
        elif now - step_began >= limit and now - self._earlier[0] >= self._listening_seconds:
            seconds = now - step_began
            report = compare_beats(own, seconds, self._earlier[1], read(), self._num_workers)
            self._hang = (step_began, report)
            return report
        return None

    def _limit(self) -> float:
        """Return how long a step may take; one long step among few says nothing yet."""
        known = len(self._step_seconds) >= _FEWEST_STEPS
        typical = median(self._step_seconds) if known else 0.0
        return max(self._hang_seconds, _SLOW_STEPS * typical)

    def _recovery(self, step: int, step_began: float) -> HangReport | None:
        assert self._hang is not None
        hang_began, report = self._hang
        if step == report.own.step:
            return None
        self._hang = self._earlier = None
        return replace(report, seconds=step_began - hang_began, recovered=True)

    def _note_pace(self, step: int, step_began: float) -> None:
        last_step, last_began = self._last
        if step > last_step:
            if last_step >= 0:
                self._step_seconds.append((step_began - last_began) / (step - last_step))
            self._last = (step, step_began)


def default_store(name: str = "0") -> Store | None:
    """Return a client of its own to the store of torch's default process group.

    Args:
        name: Tells the data-parallel groups of one job apart, say the smallest rank in each.

    Returns:
        None when there is no such store, or this torch keeps it elsewhere.
    """
    c10d: Any = dist.distributed_c10d
    try:
        client = c10d._get_default_store().clone()
        client.set_timeout(timedelta(seconds=_STORE_SECONDS))
        store: Store = c10d.PrefixStore(name, client)
        return store
    except Exception as error:
        _log.debug("no heartbeat, since torch's store is out of reach: %s", error)
        return None


def _key(rank: int) -> str:
    return f"rankscope/heartbeat/{rank}"
