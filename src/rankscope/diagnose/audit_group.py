"""What the audit remembers of one group of parameters."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from rankscope.core.state import Stateful

STEPS = 16
"""Audited steps in a row after which an error is lasting; a usual level is that of so many, too."""

USUAL = 6.0
"""Times a group's usual residual, from which it is high where that is above rounding anyway."""

_KNOWN = 4  # steps whose cosines are known, before others are judged by them


@dataclass
class Streak(Stateful):
    """Steps in a row that share something.

    Attributes:
        since: The first of them.
        last: The last of them.
        steps: How many they are; 0: none.
        worst: Largest residual in them.
    """

    since: int = 0
    last: int = 0
    steps: int = 0
    worst: float = 0.0

    def extend(self, step: int, residual: float) -> None:
        """Add a step."""
        if not self.steps:
            self.since, self.worst = step, 0.0
        self.steps += 1
        self.last = step
        self.worst = max(self.worst, residual)


@dataclass
class GroupHistory(Stateful):
    """A group's residuals so far; all are those of the workers' (lower) median.

    Attributes:
        usual: The last ones.
        kappas: How much the gradients cancelled, in the last steps that tell.
        high: The present steps in a row that are high and have not been told.
        lasting: The present steps in a row that are above what rounding gives every time.
        well: Whether some step was not high.
        sudden: Whether the last step was told as a single one.
        residual: The last one.
        kappa: How much the gradients cancelled then.
        once: What no healthy step would have exceeded then.
    """

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    kappas: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    high: Streak = field(default_factory=Streak)
    lasting: Streak = field(default_factory=Streak)
    well: bool = False
    sudden: bool = False
    residual: float = 0.0
    kappa: float = 1.0
    once: float = 0.0

    def kappa_of(self, now: float) -> float:
        """Return how much gradients cancel: as they do now, else as they may, by their past.

        Args:
            now: As the cosines of this step tell; NaN if they are not known.

        Returns:
            NaN where the past does not tell either.
        """
        if not math.isnan(now):
            self.kappas.append(now)
            return now
        if len(self.kappas) < _KNOWN:
            return math.nan
        most, least = max(self.kappas), min(self.kappas)
        return most * (most / least) ** 2 if least > 0 else math.nan

    def limit(self, once: float) -> float:
        """Return from which residual the group is high, where rounding explains ``once``."""
        return max(once, USUAL * statistics.median(self.usual)) if self.usual else once

    def take(
        self,
        step: int,
        residual: float,
        *,
        limit: float,
        once: float,
        lasting: float,
        common: float,
        at_once: bool,
    ) -> tuple[bool, Streak | None]:
        """Take one step's residual.

        Args:
            step: Its number.
            residual: That of the median worker.
            limit: What :meth:`limit` returned for it.
            once: What no healthy step exceeds.
            lasting: What no healthy steps exceed in a row.
            common: What is usual in this step, since most groups err and have done so before; 0
                if they do not.
            at_once: Whether an exception may be told in its own step.

        Returns:
            Whether this step is an exception, and the steps before if they were. Of steps in a
            row, the first alone is told at once: what follows may be the beginning of a lasting
            error.
        """
        high = residual > max(limit, common)
        exception = None
        if self.high.steps and residual <= once:
            exception = self.high if self.high.worst > common else None
            self.high = Streak()
            self.usual.clear()  # it held them
        sudden = high and at_once and self.well and not self.high.steps and not self.sudden
        if not sudden and (high or self.high.steps):
            self.high.extend(step, residual)
        if self.high.steps >= STEPS:
            self.high, self.well = Streak(), True  # so it is always, or lasting
        if not sudden or self.sudden:
            self.usual.append(residual)
        if residual > lasting:
            self.lasting.extend(step, residual)
        else:
            self.lasting = Streak()
        self.sudden, self.well = sudden, self.well or residual <= once
        self.residual, self.once = residual, once
        return sudden, exception
