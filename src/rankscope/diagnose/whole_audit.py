"""The audit of the whole gradient at once, where its groups are not audited."""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.core.rounding import UNIT_ROUNDOFF
from rankscope.core.state import Stateful
from rankscope.diagnose.audit_levels import (
    ELEMENT,
    LASTING_ROUNDINGS,
    LOSSY,
    LOW_PRECISION,
    ROUNDED,
    ROUNDINGS,
    STEPS,
    ReductionFault,
    Streak,
    most_error,
)
from rankscope.diagnose.evidence import Evidence

SPIKE = 100.0
"""Times the usual error, from which a single step is told."""

_LEAST_SPIKE = 2e-5
_TYPES = {"float16": (1.5e-4, 1.2e-3), "bfloat16": (1.2e-3, 1e-2)}


class WholeAudit(Stateful):
    """Single steps far off a run's own level, and reductions less exact than they are meant to be.

    A whole gradient may be of any size, and with its size the residual of its sketch grows. So
    single steps are judged by the run's past.

    Args:
        num_workers: W.
        reduced_in: Name of the type in which each group is meant to be reduced; the coarsest
            counts, float32 where none is said. With a type that is not known nothing is judged.
        hook: Whether a communication hook reduces: no step is told before the next one.
    """

    SETTINGS = ("_num_workers", "_hook", "_meant", "_least_spike", "_rounded")

    def __init__(
        self, num_workers: int, reduced_in: Mapping[str, str] | None = None, *, hook: bool = False
    ) -> None:
        self._num_workers = num_workers
        self._hook = hook
        types = set((reduced_in or {}).values()) or {"float32"}
        self._meant = max(types, key=lambda dtype: UNIT_ROUNDOFF.get(dtype, np.inf))
        known = self._meant in UNIT_ROUNDOFF
        error = most_error(num_workers, self._meant) if known else np.inf
        self._least_spike = max(_LEAST_SPIKE, ROUNDINGS * error)
        self._rounded = max(ROUNDED, LASTING_ROUNDINGS * error)
        self._residuals: deque[float] = deque(maxlen=STEPS)
        self._high = Streak()  # the present steps in a row that are high and have not been told
        self._usual = self._limit = 0.0  # the level before them, and from where they are high
        self._sudden = False  # whether the last step was told as a single one
        self._found: dict[str, tuple[int, int]] = {}  # the first step of a kind, and how many

    def observe(self, step: int, residual: float) -> Iterable[Evidence]:
        """Take one observed step's residual; NaN if it is not known."""
        if not np.isfinite(residual):
            return
        before = np.array(self._residuals)
        self._residuals.append(residual)
        if not self._high.steps:
            self._usual = float(np.median(before)) if len(before) else 0.0
            self._limit = max(SPIKE * self._usual, self._least_spike)
        high = len(before) >= STEPS // 2 and residual > self._limit
        if self._high.steps and not high:
            yield self._tell_spike()
        sudden = high and not (self._hook or self._high.steps or self._sudden)
        if high:
            self._high.extend(step, residual)
        if sudden:
            yield self._tell_spike()
        self._sudden = sudden
        if self._high.steps >= STEPS:
            self._high = Streak()  # it is lasting
        lasting = np.array(self._residuals)
        if len(lasting) == STEPS and (lasting > self._rounded).all():
            typical = float(np.median(lasting))
            fits = self._types_that_fit(typical)
            key = LOW_PRECISION if fits else LOSSY
            yield self._tell(
                key,
                max(step - STEPS + 1, 0),
                step,
                1 if key in self._found else STEPS,
                residual=typical,
                limit=self._rounded,
                fits=" or ".join(fits),
            )

    def close(self) -> Iterable[Evidence]:
        """End the run: a last step that was the first high one and has not been told is."""
        if self._hook and self._high.steps == 1:
            yield self._tell_spike()

    def _types_that_fit(self, residual: float) -> list[str]:
        return [
            dtype
            for dtype, (least, most) in _TYPES.items()
            if UNIT_ROUNDOFF[dtype] > UNIT_ROUNDOFF[self._meant] and least <= residual <= most
        ]

    def _tell_spike(self) -> Evidence:
        """Tell the present steps in a row, which end with it."""
        streak, self._high = self._high, Streak()
        return self._tell(
            ELEMENT,
            streak.since,
            streak.last,
            streak.steps,
            residual=streak.worst,
            limit=self._limit,
            against=f"usually {self._usual:.1g}",
        )

    def _tell(
        self,
        key: str,
        since: int,
        last: int,
        more: int,
        *,
        residual: float,
        limit: float,
        against: str = "",
        fits: str = "",
    ) -> Evidence:
        first, before = self._found.get(key, (since, 0))
        self._found[key] = first, before + more
        steps = before + more
        ranks = tuple(range(self._num_workers))
        fault = ReductionFault(first, last, steps, (), ranks, residual, limit, fits)
        return fault.evidence(key, "all parameters together", against, self._meant)
