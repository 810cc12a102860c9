"""A run in one row: healthy or not, since when, and how far it is."""

import itertools
import math
import statistics
from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats, Ints
from rankscope.core.finding import Finding
from rankscope.core.signals import Table
from rankscope.diagnose.rules import ranked
from rankscope.record import Run
from rankscope.web.live.catalog import Place, Stamp
from rankscope.web.words import title_of, title_of_finding

SPARK_POINTS = 48
"""Points of the small curve of the averaged loss."""
MIN_PATIENCE = 60.0
"""Seconds without a new step after which a run may be called stalled."""
START_PATIENCE = 600.0
"""The same before the first step, which includes reading data and compiling."""
_STEPS_OF_PATIENCE = 8
_FLUSH_SECONDS = 10.0
_RECENT = 50

UNREADABLE = "unreadable"
ORDER = ("error", "warning", UNREADABLE, "note", "healthy")
"""Severities, worst first."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What the list of runs shows of one.

    Attributes:
        place: Where it lies.
        title: Its name.
        severity: ``error``, ``warning``, ``note``, ``healthy``, or ``unreadable``.
        headline: What is wrong in a few words; empty when nothing is.
        since_step: The first step that shows the worst finding.
        since: When that was, in seconds since 1970.
        ended: ``running`` as long as ``run.json`` says so, else how the run ended.
        num_workers: W.
        num_steps: Recorded steps.
        last_step: The last of them, None without any.
        last_time: When it was taken, in seconds since 1970.
        changed: When the youngest file was written, likewise.
        patience: Seconds without a change after which it counts as stalled.
        spark: Points of the averaged loss between 0 (bottom) and 1, None where it is undefined.
    """

    place: Place
    title: str
    severity: str
    headline: str
    since_step: int | None
    since: float | None
    ended: str
    num_workers: int
    num_steps: int
    last_step: int | None
    last_time: float | None
    changed: float
    patience: float
    spark: tuple[float | None, ...]

    def state(self, now: float) -> str:
        """Return ``running``, ``starting``, ``stalled``, or how the run ended."""
        if self.severity == UNREADABLE:
            return UNREADABLE
        if self.ended != "running":
            return self.ended
        if now - self.changed > self.patience:
            return "stalled"
        return "running" if self.num_steps else "starting"

    @property
    def line(self) -> str:
        """The small curve as the points of an SVG polyline in a box of 100 × 24."""
        width = max(1, len(self.spark) - 1)
        known = [(i, value) for i, value in enumerate(self.spark) if value is not None]
        return " ".join(f"{100 * i / width:.1f},{22 - 20 * value:.1f}" for i, value in known)


def glance(place: Place, at: Stamp) -> Glance:
    """Look at a run.

    Raises:
        RunError: It cannot be read.
    """
    return _look(place, at, Run.open(place.path))


def unreadable(place: Place, why: str, changed: float = 0.0) -> Glance:
    """Return the row of a run that cannot be read."""
    return Glance(
        place, place.name, UNREADABLE, why, None, None, "", 0, 0, None, None, changed, 0.0, ()
    )


def in_order(glances: list[Glance]) -> list[Glance]:
    """Return the rows with the worst first, among equals the youngest."""
    return sorted(glances, key=lambda g: (ORDER.index(g.severity), -g.changed, g.place.id))


def _look(place: Place, at: Stamp, run: Run) -> Glance:
    columns = run.columns(Table.STEPS, "step", "time", "loss_mean")
    step_T, time_T = columns["step"], columns["time"]
    worst = next(iter(ranked(run.findings())), None)
    severity = "healthy" if worst is None else str(worst.severity)
    return Glance(
        place=place,
        title=title_of(run.info, place.path),
        severity=severity,
        headline="" if worst is None else title_of_finding(worst),
        since_step=None if worst is None else worst.first_step,
        since=None if worst is None else _time_of(worst, step_T, time_T),
        ended=run.status,
        num_workers=run.num_workers,
        num_steps=len(step_T),
        last_step=int(step_T[-1]) if len(step_T) else None,
        last_time=_finite(float(time_T[-1])) if len(time_T) else None,
        changed=at.changed,
        patience=_patience(time_T),
        spark=_spark(columns["loss_mean"]),
    )


def _time_of(finding: Finding, step_T: Ints, time_T: Floats) -> float | None:
    at = int(np.searchsorted(step_T, finding.first_step))
    return _finite(float(time_T[at])) if at < len(time_T) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _patience(time_T: Floats) -> float:
    """Return the longest pause that is usual for this run, in seconds."""
    if not len(time_T):
        return START_PATIENCE
    recent = [b - a for a, b in itertools.pairwise(time_T[-_RECENT:].tolist()) if b > a]
    usual = statistics.median(recent) if recent else 0.0
    return max(MIN_PATIENCE, _STEPS_OF_PATIENCE * usual + _FLUSH_SECONDS)


def _spark(loss_T: Floats) -> tuple[float | None, ...]:
    if not np.isfinite(loss_T).any():
        return ()
    bins = [part[np.isfinite(part)] for part in np.array_split(loss_T, SPARK_POINTS) if len(part)]
    means = [float(part.mean()) if len(part) else None for part in bins]
    known = [value for value in means if value is not None]
    low, room = min(known), max(known) - min(known)
    return tuple(None if v is None else round((v - low) / room if room else 0.5, 3) for v in means)
