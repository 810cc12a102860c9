"""When in a run scheduled work is due, and how often gradients are measured.

``RANKSCOPE_EAGER=1`` moves all of it into the first thirty steps, and canaries and reference steps
into the first four, so that tests reach late failures before users do. Numbers of steps that a
statistic needs, and timeouts, stay as they are.
"""

import os
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.stats.arrays import Floats

VARIABLE = "RANKSCOPE_EAGER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Steps and seconds, each explained where it is used."""

    lag: int = 16  # ``rankscope.bus.pace.LAG``
    first_kept: int = 16  # steps until the batches of a run's first canary are kept
    # steps that a training may be ahead of the root's judgement; None for any number
    lead: int | None = None
    governed_after: int = 300  # ``rankscope.bus.pace.ALWAYS``
    widest_interval: int = 1024  # ``rankscope.bus.pace.MAX_INTERVAL``
    governor_patience: int = 16  # observed steps between a decision and a narrower interval
    canary_spacing: int = 200  # steps between two canaries of findings, or of a schedule, at least
    canary_retry: int = 64  # steps until a canary that some worker missed is tried again
    canary_share: float = 0.002  # share of the training's time for canaries that nobody asked for
    # steps of a session whose gradient is computed again without a request
    references: tuple[int, ...] = ()
    state_in_turn: int = 32  # steps in which a part of the state is read
    state_spacing: int = 8  # ``rankscope.session.instruments.STATE_SPACING``
    later_look: int = 32  # step of a session in which the roles of parameters are read again
    look_every: int = 1024  # steps between two readings of the roles after it
    flags_every: int = 16  # steps between two readings of torch's global settings
    rolled_up: tuple[int, int] = (64, 512)  # ``rankscope.record.rollups.LEVELS``
    part_bytes: int = 16 * 2**20  # ``rankscope.record.writer.PART_BYTES``
    most_flush_seconds: float = float("inf")  # upper limit of ``flush_seconds``
    # interval between two searches for changed files, for an object store
    sent_seconds: float = 30.0


EAGER = Pace(
    lag=2,
    first_kept=1,
    lead=2,
    governed_after=12,
    widest_interval=2,
    governor_patience=4,
    canary_spacing=8,
    canary_retry=8,
    canary_share=1e6,
    references=(2, 3, 20),
    state_in_turn=8,
    state_spacing=2,
    later_look=3,
    look_every=16,
    flags_every=4,
    rolled_up=(8, 24),
    part_bytes=2**14,
    most_flush_seconds=0.0,
    sent_seconds=0.5,
)

PACE = EAGER if os.environ.get(VARIABLE, "0") not in ("", "0") else Pace()
"""The pace of this process; all ranks of a run have the same, see ``session/opening.py``."""


LAG = PACE.lag
"""Steps from the newest step known to the root to the first one that a decision holds for.

Steps are gathered beside the training, which is some steps further on by then, and a little further
on one worker than on another. If a decision took effect at once, some workers would measure a step
and others not. Where a worker learns of it more than 16 steps late, some steps do not count as
observed.
"""

ALWAYS = PACE.governed_after
"""Steps at the beginning of a run that no budget thins out."""

MAX_INTERVAL = PACE.widest_interval

_FIRST_IGNORED = 3  # of each kind: they compile kernels and allocate memory
_FAST = 8
_SLOW = 32  # samples that a decision to widen, or to narrow, rests on
_FEWEST = 4
_PATIENCE = PACE.governor_patience
_MOST_PATIENCE = 128  # observed steps between a decision and narrowing
_SHORT_SECONDS = 0.02  # of a step that pays more than a budget of 1 % in any case
_ROOM = 0.8  # share of the budget: largest expected overhead of a narrower interval


_RECORDED = ("first_step", "interval", "overhead_before", "overhead_expected")  # of a decision


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of the sampling interval."""

    first_step: int  # the first step that it holds for
    interval_before: int
    interval: int
    overhead_before: float  # overhead until then, as a share of the step's own time
    overhead_expected: float  # expected overhead from then on
    budget: float  # largest overhead allowed

    def __str__(self) -> str:
        text = (
            f"from step {self.first_step} on gradients are measured every {self.interval} steps "
            f"instead of every {self.interval_before}: so far the monitor took "
            f"{self.overhead_before:.2%} of the training's time, now {self.overhead_expected:.2%} "
            f"are expected; the budget is {self.budget:.2%}"
        )
        if self.overhead_expected > self.budget:
            text += ", which measuring gradients less often cannot meet"
        return text


@dataclass(frozen=True, slots=True)
class _Cost:
    """Typical seconds per step: observed or not, and without the monitor."""

    observed: float
    unobserved: float
    plain: float

    def share(self, interval: int) -> float:
        """Return the share that the monitor adds to the training's time with this interval."""
        unobserved = min(self.unobserved, self.observed)
        return (unobserved + (self.observed - unobserved) / interval) / self.plain

    def governed_share(self, interval: int, budget: float) -> float:
        """Return the share to compare with the budget: the part that a wider interval reduces.

        That is the whole, unless steps that are not observed cost more than the budget by
        themselves. Then it is the part that gradients add.
        """
        floor = min(self.unobserved, self.observed) / self.plain
        return self.share(interval) - (floor if floor > budget else 0.0)


class Intervals:
    """The governor's decisions on a worker: which steps are measured."""

    def __init__(self, every: int) -> None:
        self._changes: list[tuple[int, int]] = [(0, every)]

    def interval_at(self, step: int) -> int:
        """Return the interval in force: a step is observed when it is a multiple of it."""
        for first_step, interval in reversed(self._changes):
            if first_step <= step:
                return interval
        return self._changes[0][1]

    def add(self, first_step: int, interval: int) -> None:
        """Add a decision, in order: the interval from ``first_step`` on."""
        self._changes.append((first_step, interval))


class Governor:
    """Decides in which steps gradients are measured: as often as a budget allows.

    In the slowest worker, a step that is not observed costs b seconds, an observed one c, and a
    step without the monitor takes T. With gradients measured every m-th step the monitor adds
    (b + (c − b)/m)/T to the training. The smallest m among ``every``, 2·``every``, … up to 1,024 is
    chosen that keeps this within the budget. Where b alone exceeds it, (c − b)/m is kept within it.

    It is a pure function of its steps, at the root alone: no clock, no randomness. Each decision is
    sent to the workers with the step that it holds from, and waits there in :class:`Intervals`.

    ``budget`` is the largest share of the training's own time that the monitor may add; None leaves
    the interval alone. The interval is only widened from ``every``, from the step ``always`` on.
    """

    def __init__(self, budget: float | None, every: int, always: int = ALWAYS) -> None:
        self._budget = budget
        self._every = every
        self._always = always
        self._observed: deque[float] = deque(maxlen=_SLOW)
        self._unobserved: deque[float] = deque(maxlen=_SLOW)
        self._plain: deque[float] = deque(maxlen=_SLOW)
        self._fixed: deque[float] = deque(maxlen=_SLOW)
        self._looks_at_fixed = budget is not None
        self._num_seen = {True: 0, False: 0}
        self._since_decision = 0
        self._patience = _PATIENCE
        self._intervals = Intervals(every)
        self.decisions: list[Decision] = []

    def interval_at(self, step: int) -> int:
        """Return the interval in force: a step is observed when it is a multiple of it.

        The interval of a step is final once the step ``LAG`` before it has been observed.
        """
        return self._intervals.interval_at(step)

    def observe(
        self,
        step: int,
        observed: bool,
        overhead_seconds_W: Floats,
        step_seconds_W: Floats,
        newest: int | None = None,
        read_seconds_W: Floats | None = None,
    ) -> Decision | None:
        """Process a step; all steps come, in order.

        ``overhead_seconds_W`` is the time that the monitor took from each worker's training thread,
        ``read_seconds_W`` the part of it in which gradients were read; values that are not finite
        are left out. ``newest`` is the newest step that any worker is known to have ended.
        """
        overhead = _largest(overhead_seconds_W)
        seconds = _largest(step_seconds_W)
        self._num_seen[observed] += 1
        if overhead is None or self._num_seen[observed] <= _FIRST_IGNORED:
            return None
        (self._observed if observed else self._unobserved).append(overhead)
        if seconds is not None and seconds > overhead:
            self._plain.append(seconds - overhead)
        fixed = None if read_seconds_W is None else _largest(overhead_seconds_W - read_seconds_W)
        if fixed is not None:
            self._fixed.append(fixed)
        self._since_decision += observed
        newest = step if newest is None else max(step, newest)
        ready = observed and newest + LAG >= self._always
        return self._decide(step, newest) if ready else None

    def short_steps(self, newest: int) -> str:
        """Return, once, what short steps pay though no gradient is read; mostly empty."""
        cost = self._cost(_SLOW)
        begins = newest + LAG >= self._always
        if not (self._looks_at_fixed and begins and cost and len(self._fixed) >= _FEWEST):
            return ""
        self._looks_at_fixed = False
        fixed = _typical(self._fixed, _SLOW)
        if (
            self._budget is None
            or cost.plain >= _SHORT_SECONDS
            or fixed <= self._budget * cost.plain
        ):
            return ""
        return (
            f"a step takes {1e3 * cost.plain:.2g} ms, and watching it takes {1e3 * fixed:.2g} ms "
            f"({fixed / cost.plain:.1%}) even where no gradient is read: the budget of "
            f'{self._budget:.2%} cannot be kept. tier="scalars" takes less, and every=10 reads '
            "the gradient less often"
        )

    def summary(self) -> dict[str, Any]:
        """Return the decisions and their reasons as JSON for the record; None is unknown."""
        cost = self._cost(_SLOW)
        interval = self.decisions[-1].interval if self.decisions else self._every
        overhead = None if cost is None else cost.share(interval)
        return {
            "budget": self._budget,
            "every": self._every,
            "interval": interval,
            "overhead": overhead,
            "overhead_without_governor": None if cost is None else cost.share(self._every),
            "observed_step_seconds": None if cost is None else cost.observed,
            "unobserved_step_seconds": None if cost is None else cost.unobserved,
            "plain_step_seconds": None if cost is None else cost.plain,
            "within_budget": None
            if overhead is None or self._budget is None
            else overhead <= self._budget,
            "changes": [
                {name: getattr(decision, name) for name in _RECORDED} for decision in self.decisions
            ],
        }

    def _decide(self, step: int, newest: int) -> Decision | None:
        last = self.decisions[-1] if self.decisions else None
        pending = last is not None and step < last.first_step
        recent = None if self._budget is None or pending else self._cost(_FAST)
        if self._budget is None or recent is None:
            return None
        now = self.interval_at(step)
        if recent.governed_share(now, self._budget) > self._budget:
            return self._change(now, newest, self._smallest(recent, self._budget), recent)
        if self._since_decision < self._patience or now == self._every:
            return None
        lasting = self._cost(_SLOW)
        if lasting is None:
            return None
        shares = [cost.governed_share(now // 2, self._budget) for cost in (lasting, recent)]
        if max(shares) <= _ROOM * self._budget:
            return self._change(now, newest, now // 2, lasting)
        return None

    def _change(self, now: int, newest: int, interval: int, cost: _Cost) -> Decision | None:
        """Add a decision; one to widen that undoes one to narrow doubles the patience."""
        assert self._budget is not None
        if interval == now:
            return None  # the widest already
        last = self.decisions[-1] if self.decisions else None
        if interval > now and last is not None and last.interval < last.interval_before:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._since_decision = 0
        before = cost.share(now)
        expected = cost.share(interval)
        first = newest + LAG
        decision = Decision(first, now, interval, before, expected, self._budget)
        self.decisions.append(decision)
        self._intervals.add(first, interval)
        return decision

    def _smallest(self, cost: _Cost, budget: float) -> int:
        interval = self._every
        while cost.governed_share(interval, budget) > budget and 2 * interval <= MAX_INTERVAL:
            interval *= 2
        return interval

    def _cost(self, num_samples: int) -> _Cost | None:
        if len(self._observed) < _FEWEST or len(self._plain) < _FEWEST:
            return None
        return _Cost(
            _typical(self._observed, num_samples),
            _typical(self._unobserved, num_samples) if self._unobserved else 0.0,
            _typical(self._plain, _SLOW),
        )


def _typical(samples: deque[float], num_samples: int) -> float:
    return statistics.median(list(samples)[-num_samples:])


def _largest(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else None
