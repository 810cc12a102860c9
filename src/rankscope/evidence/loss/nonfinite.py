"""Losses and gradients that are not finite, and gradients that are zero."""

from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.step import MISSING_INT, GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.weighting import common_scale
from rankscope.bus.words import count, named, shortened
from rankscope.stats.arrays import Ints

_SKIPS_IN_A_ROW = 20
_ZERO_IN_A_ROW = 8
_WITHOUT = 16  # measured steps
_NAMED = 4

PARTS = "parts-without-gradient"
"""Key of the finding of parameters that never had a gradient, while others have."""


class NonFinite(Detector):
    """Infinities and NaN in local losses and gradients.

    It is an error where the optimizer was called all the same, or may have been. A gradient scaler
    overflows now and then on purpose, and the optimizer skips that step: then a bad loss is a
    warning, and so are very many skipped steps although the scale has fallen to 1.
    """

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._span = PersistentFault()
        self._severity = Severity.NOTE
        self._applied = False
        self._skips_in_a_row = 0

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report NaN and infinite values."""
        gathered = step.gathered
        if not step.some_true("nonfinite"):
            self._skips_in_a_row = 0
            return ()
        ranks = np.flatnonzero(gathered.workers["nonfinite"])
        self._span.see(gathered.step)
        in_loss = _has_bad_loss(gathered, ranks)
        for rank in ranks.tolist():
            self._seen[rank] = "loss" if in_loss else self._seen.get(rank, "gradient")
        skipped = _was_skipped(gathered)
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        self._applied = self._applied or skipped is False
        stuck = self._skips_in_a_row >= _SKIPS_IN_A_ROW and not common_scale(gathered) > 1
        severity = Severity.WARNING if in_loss or stuck else Severity.NOTE
        self._severity = max(self._severity, severity if skipped else Severity.ERROR)
        return (self._evidence(),)

    def _evidence(self) -> FaultEvidence:
        what = "loss" if "loss" in self._seen.values() else "gradient"
        applied = ", and the optimizer went on" if self._applied else ""
        return self._span.evidence(
            "numerics.nonfinite",
            self._severity,
            self._seen,
            {"what": what, "applied": applied},
            {"steps": self._span.count, "in": what},
        )


class NoGradient(Detector):
    """Local gradients that are zero in every element, on all workers, in eight steps in a row.

    Args:
        num_workers: W.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._zero = PersistentFault(_ZERO_IN_A_ROW, in_a_row=True)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report missing gradients, and the end of that."""
        ends = step.ends("grad_norm")
        if np.isnan(ends).any():
            return ()
        ranks = range(self._num_workers) if ends == (0, 0) else ()
        return (self._evidence(),) if self._zero.observe(step.gathered.step, ranks) else ()

    def _evidence(self) -> FaultEvidence:
        over = "" if self._zero.open else " It is over now."
        zero = self._zero
        numbers = {"steps": self._zero.count}
        return zero.evidence(
            "loss.no_gradient", Severity.WARNING, zero.ranks, {"over": over}, numbers
        )


class PartsWithoutGradient(Detector):
    """Groups of trained parameters whose gradient was zero on all workers in each measured step.

    A warning where they are half of the groups or more, else a note: a head may not be in use.
    """

    def __init__(self) -> None:
        self._without: list[str] | None = None
        self._steps = 0
        self._first = 0
        self._num_groups = 0
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report groups without a gradient, and those that get one later."""
        norms_WG = step.gathered.group_norms_WG
        if norms_WG is None or not norms_WG.any() or not np.isfinite(norms_WG).all():
            return ()
        groups = step.gathered.groups
        idle_G = np.abs(norms_WG).max(axis=0) == 0
        zero = {name for name, idle in zip(groups, idle_G, strict=True) if idle}
        before = groups if self._without is None else self._without
        still = [name for name in before if name in zero]
        if not self._steps:
            self._first = step.gathered.step
        self._steps += 1
        self._num_groups = len(groups)
        changed = self._steps == _WITHOUT or self._without != still
        self._without = still or (self._without if self._span.open else still)
        if self._steps < _WITHOUT or not changed or not (still or self._span.open):
            return ()
        if still:
            self._span.see(step.gathered.step, first=self._first, before=self._steps - 1)
        else:
            self._span.close()
        return (self._evidence(),)

    def _evidence(self) -> FaultEvidence:
        names = self._without or []
        most = 2 * len(names) >= self._num_groups
        fields = {
            "names": shortened(names, _NAMED),
            "of": f"{len(names)} of {count(self._num_groups, 'group')}",
            "over": "" if self._span.open else " They get one now.",
        }
        severity = Severity.WARNING if most else Severity.NOTE
        return self._span.evidence(
            "loss.no_gradient", severity, (), fields, named(names), key=PARTS
        )


def _was_skipped(gathered: GatheredStep) -> bool | None:
    """Return whether no worker called the optimizer in this step; None if unknown."""
    calls_W = gathered.workers["optimizer_steps"]
    if (calls_W == MISSING_INT).any():
        return None
    return not calls_W.any()


def _has_bad_loss(gathered: GatheredStep, ranks: Ints) -> bool:
    """Return whether these ranks' losses are not finite, in a run that measures losses."""
    losses_W = gathered.workers["loss"]
    measured = np.isfinite(losses_W).any() or np.isinf(losses_W).any()
    return bool(measured and not np.isfinite(losses_W[ranks]).all())
