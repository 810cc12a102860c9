"""The detector of stragglers: workers, or whole hosts, that all others wait for.

It reads ``busy_seconds``, the time for which a worker was busy before it began to wait. Speed is
no random sample, so this stands beside the budget of false alarms: it raises notes only.

Legend of shapes: S steps of a window, W workers.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.bus.detector import (
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Derived
from rankscope.bus.replicas import ranks_by
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.words import name_ranks
from rankscope.stats.arrays import Bools, Floats, Ints
from rankscope.stats.state import State

_MARGIN = 0.10  # of the step's time, over the typical worker
_LEAST_SECONDS = 2e-3  # below, it is the operating system's
_MOST = 0.75  # of a window's steps


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of the workers in a window of steps."""

    steps_S: Ints
    seconds: float
    margin: float  # seconds behind from which on a worker is slow
    # seconds by which a worker was ready later than the typical one; NaN if unknown
    behind_SW: Floats
    slow_W: Bools  # whether a worker was clearly slow
    lingers_W: Bools  # whether one that was slow before still is

    @classmethod
    def of(cls, steps_S: Ints, seconds_S: Floats, behind_SW: Floats) -> "Lateness":
        """Judge a window; in each of its steps some worker's lateness is known."""
        seconds = float(np.median(seconds_S))
        margin = max(_MARGIN * seconds, _LEAST_SECONDS)
        slow_W = np.mean(behind_SW >= margin, axis=0) >= _MOST
        last_S = np.nanargmax(behind_SW, axis=1)
        if np.mean(slow_W[last_S]) <= 0.5:
            slow_W = np.zeros_like(slow_W)
        lingers_W = np.mean(behind_SW >= margin / 2, axis=0) >= 0.5
        return cls(steps_S.copy(), seconds, margin, behind_SW.copy(), slow_W, lingers_W)


def typical_worker(seconds_W: Floats) -> float:
    """Return the lower median over the workers whose value is known, at least one of them."""
    known = seconds_W[np.isfinite(seconds_W)]
    middle = (len(known) - 1) // 2
    return float(np.partition(known, middle)[middle])


def find_onset(behind_S: Floats, level: float) -> int:
    """Return where a series changed from about 0 to about ``level`` for good.

    The most likely place if the noise is normal: where the sum of ``behind − level/2`` to the end
    is largest.
    """
    return len(behind_S) - 1 - int(np.argmax(np.cumsum((behind_S - level / 2)[::-1])))


def find_end(behind_S: Floats, level: float) -> int:
    """Return the number of steps after which a series fell from about ``level`` to about 0."""
    sums_S = np.cumsum(behind_S - level / 2)
    return int(np.argmax(sums_S)) + 1 if sums_S.max() > 0 else 0


WARM_UP = 10
"""Steps that are left out: they compile, allocate and fill caches."""
WINDOW = 50
"""Steps that are judged together."""

_PATIENCE = 2  # windows in a row, to open and to close a finding


class Stragglers(Detector):
    """Workers that are clearly slower than the typical one, most of the time.

    The typical worker of a step is the median one, the faster of the two middle ones if their
    number is even: so up to half of the workers can be named, one of two among them. A worker is
    slow in a window when it takes at least 10 % of the step's time (and 2 ms) more than the
    typical worker in 75 % of the window's steps, and the last worker of most steps is a slow one.
    Two windows in a row open a finding; two in which a worker exceeds half of that margin in less
    than half of the steps close it.

    Where the workers of several hosts are known, all slow ones of a host make one finding. A job
    that was restarted warms up again, and may have moved to other hosts: its windows begin anew.
    """

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        self._places = _places(num_workers, hosts)
        self._steps_S = np.zeros(WINDOW, np.int64)
        self._seconds_S = np.zeros(WINDOW)
        self._behind_SW = np.zeros((WINDOW, num_workers))
        self._num_seen = 0
        self._windows: deque[Lateness] = deque(maxlen=_PATIENCE + 1)
        self._gone: list[_Place] = []  # slow before a restart, and no longer there

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report at the end of a window."""
        gone = tuple(place.describe() for place in self._gone)
        self._gone = []
        return gone + self._add_step(step)

    def state(self) -> State:
        """Return the places that were slow."""
        known = [place for place in self._places if place.count]
        described = [
            {"ranks": list(place.members), "host": place.host, "known": place.state()}
            for place in known
        ]
        return {"places": described}

    def restore(self, state: State) -> None:
        """Continue with the places of before a restart; those that no longer exist have healed."""
        places = {place.key: place for place in self._places}
        for description in state["places"]:
            before = _Place(description["ranks"], description["host"])
            before.restore(description["known"])
            now = places.get(before.key)
            if now is not None and now.members == before.members:
                now.restore(before.state())
            elif before.open:
                before.open = False
                self._gone.append(before)

    def _add_step(self, step: Step) -> tuple[FaultEvidence, ...]:
        workers = step.gathered.workers
        busy_W = workers["busy_seconds"]
        known = len(busy_W) > 1 and np.isfinite(step.ends("busy_seconds")).all()
        if not known and np.count_nonzero(np.isfinite(busy_W)) < 2:
            return ()
        self._num_seen += 1
        if self._num_seen <= WARM_UP:
            return ()
        at = (self._num_seen - WARM_UP - 1) % WINDOW
        self._steps_S[at] = step.gathered.step
        self._behind_SW[at] = busy_W - typical_worker(busy_W)
        seconds_W = np.concatenate([workers["step_seconds"], busy_W])
        self._seconds_S[at] = np.fmax.reduce(seconds_W)  # at least the slowest one's; without NaN
        return tuple(self._judge()) if at == WINDOW - 1 else ()

    def _judge(self) -> Iterator[FaultEvidence]:
        window = Lateness.of(self._steps_S, self._seconds_S, self._behind_SW)
        before_W = self._windows[-1].slow_W if self._windows else np.zeros_like(window.slow_W)
        self._windows.append(window)
        confirmed_W = window.slow_W & before_W
        for place in self._places:
            if place.add_window(confirmed_W, self._windows):
                yield place.describe()


class _Place(PersistentFault):
    """A host with its ranks, or a single rank, and its evidence."""

    SETTINGS = (*PersistentFault.SETTINGS, "members", "host")

    def __init__(self, ranks: Sequence[int], host: str = "") -> None:
        super().__init__()
        self.members = tuple(ranks)
        self.host = host
        self._slow: list[int] = []
        self._lost = self._behind = self._share = 0.0
        self._quiet_windows = 0

    @property
    def key(self) -> str:
        """Its name inside the run."""
        return f"time.straggler:{f'host-{self.host}' if self.host else f'rank-{self.members[0]}'}"

    def add_window(self, confirmed_W: Bools, windows: Sequence[Lateness]) -> bool:
        """Process the latest window and those before it; return whether the evidence changed."""
        confirmed = [rank for rank in self.members if confirmed_W[rank]]
        if not self.open:
            if confirmed:
                self._begin(confirmed, windows)
            return bool(confirmed)
        self._slow = sorted({*self._slow, *confirmed})
        latest = windows[-1]
        behind_S = self._lateness(latest)
        lingers = bool(latest.lingers_W[self._slow].any())
        if lingers:
            self._quiet_windows = 0
            self._measure(behind_S, latest)
        else:
            self._quiet_windows += 1
            self.open = self._quiet_windows < _PATIENCE
        if self._quiet_windows <= 1:
            end = find_end(behind_S, self._behind)
            self._add(latest.steps_S[:end], behind_S[:end], latest.margin)
        return lingers or not self.open

    def describe(self) -> FaultEvidence:
        """Return the evidence."""
        healed = "" if self.open else f" to step {self.last:,}"
        return self.evidence(
            "time.straggler",
            Severity.NOTE,
            self._slow,
            {
                "When": f"{'From' if healed else 'Since'} step {self.first:,}{healed}",
                "who": self._name(),
                "behind": _duration(self._behind),
                "share": f"{self._share:.0%}",
                "lost": _duration(self._lost),
            },
            {
                "seconds_behind": self._behind,
                "share_of_step": self._share,
                "seconds_lost": self._lost,
                "slow_steps": self.count,
                **({"host": self.host} if self.host else {}),
            },
            key=self.key,
        )

    def _begin(self, slow: list[int], windows: Sequence[Lateness]) -> None:
        self.open = True
        self._quiet_windows = 0
        self._slow = slow
        self.count = 0
        self._lost = 0.0
        latest = windows[-1]
        steps = np.concatenate([window.steps_S for window in windows])
        behind = np.concatenate([self._lateness(window) for window in windows])
        self._measure(behind[-len(latest.steps_S) :], latest)
        start = find_onset(behind, self._behind)
        self.first = int(steps[start])
        self._add(steps[start:], behind[start:], latest.margin)

    def _measure(self, behind_S: Floats, latest: Lateness) -> None:
        self._behind = float(np.median(behind_S))
        self._share = self._behind / latest.seconds

    def _add(self, steps_S: Ints, behind_S: Floats, margin: float) -> None:
        """Add the steps in which it was behind."""
        over_S = behind_S >= margin / 2
        self.last = int(steps_S[over_S].max(initial=self.last))
        self.count += int(np.count_nonzero(over_S))
        self._lost += float(np.sum(behind_S[over_S]))

    def _lateness(self, window: Lateness) -> Floats:
        """Return how late the last of the slow workers was; 0 where that is unknown."""
        lateness_S: Floats = np.nan_to_num(window.behind_SW[:, self._slow]).max(axis=1)
        return lateness_S

    def _name(self) -> str:
        ranks = name_ranks(self._slow)
        if not self.host:
            return ranks
        if len(self._slow) > 1 and len(self._slow) == len(self.members):
            return f"host {self.host} ({ranks})"
        return f"{ranks} on host {self.host}"


def _places(num_workers: int, hosts: Sequence[str]) -> tuple[_Place, ...]:
    """Return the hosts, if there are several, or else the single ranks."""
    if len(hosts) != num_workers or len(set(hosts)) < 2:
        return tuple(_Place([rank]) for rank in range(num_workers))
    return tuple(_Place(ranks, host) for host, ranks in ranks_by(hosts).items())


def _duration(seconds: float) -> str:
    """Return a duration in words: ``35 ms``, ``4.2 s``, ``1.5 h``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (Stragglers(run.num_workers, run.hosts),)


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    return (Check("slow workers", WARM_UP + WINDOW),)


def derive(gathered: GatheredStep) -> Derived:
    """Return the slowest worker's overhead."""
    seconds_W = gathered.workers["overhead_seconds"]
    known_W = seconds_W[np.isfinite(seconds_W)]
    return Derived({"overhead_seconds": float(known_W.max()) if known_W.size else math.nan})
