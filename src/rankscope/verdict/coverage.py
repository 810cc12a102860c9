"""What of a run was checked and measured, so that silence is never taken for health.

Each judge declares the number of steps it needs. A verdict says no more than what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.bus.detector import Check, CheckedRun
from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.bus.words import count, shortened
from rankscope.evidence import EVIDENCE
from rankscope.record import Run
from rankscope.record.tables import Columns


def checks_of(
    num_workers: int, options: object, *, samples: bool = True, canaries: bool | None = None
) -> tuple[Check, ...]:
    """Return the checks of a run, see :class:`rankscope.bus.detector.CheckedRun`."""
    if num_workers < 2:
        return ()
    given = options if isinstance(options, Mapping) else {}
    run = CheckedRun(num_workers, given, samples, canaries)
    made = (each.at_root("make_checks") for each in EVIDENCE)
    return tuple(check for make in made if make is not None for check in make(run))


def missing_steps(checks: Sequence[Check], num_steps: int) -> int:
    """Return the number of further steps that the slowest check needs."""
    needed = [check.needs for check in checks if not check.impossible]
    return max(0, max(needed, default=0) - num_steps)


def describe_checks(checks: Sequence[Check], num_steps: int) -> tuple[str, ...]:
    """List the checks done, those to come, and impossible ones, in one sentence each."""
    possible = [check for check in checks if not check.impossible]
    done = [check.what for check in possible if check.needs <= num_steps and not check.pending]
    waiting = [
        f"{check.what} ({check.pending or count(check.needs - num_steps, 'more step')})"
        for check in possible
        if check.needs > num_steps or check.pending
    ]
    never = [f"{check.what} ({check.impossible})" for check in checks if check.impossible]
    parts = (
        ("Checked so far: ", done) if waiting else ("", []),
        ("Not yet checked: ", waiting),
        ("This run cannot show: ", never),
    )
    return tuple(f"{label}{'; '.join(items)}." for label, items in parts if items)


COLUMNS = ("step", "loss_mean", "observed", "interval")
"""The columns of the steps table from which the coverage follows."""

_NAMES = 3


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """What was measured in the steps of a run."""

    steps: int  # recorded steps
    losses: int  # steps with a loss
    # steps whose gradients were to be measured: those that ``every`` and the budget leave out are
    # not among them
    due: int
    gradients: int  # steps among them with the gradients of all workers
    # tensors of the watched model, where the optimizer is known to have more; else 0
    watched: int = 0
    updated: int = 0  # tensors of the optimizer, likewise
    unwatched: tuple[str, ...] = ()  # names of some of those that are not watched

    @property
    def enough(self) -> bool:
        """Whether the run can be judged: half of the due steps and of the tensors were measured."""
        return self.has_gradients and 2 * self.watched >= self.updated

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were measured in half of the steps in which they were due."""
        return self.gradients > 0 and self.due <= 2 * self.gradients

    @property
    def has_losses(self) -> bool:
        """Whether half of the steps have a loss."""
        return self.losses > 0 and self.steps <= 2 * self.losses

    @property
    def severity(self) -> Severity | None:
        """The severity of what is missing: a part of the model, or too much to judge the run."""
        if not self.enough:
            return Severity.WARNING
        return Severity.NOTE if self.updated else None

    @property
    def limits(self) -> str:
        """What limits the verdict, in a clause; empty if nothing does."""
        parts = []
        if not self.has_gradients:
            parts.append(f"gradients were measured in {_of(self.gradients, self.due)}")
        if self.watched < self.updated:
            left_out = shortened(list(self.unwatched), _NAMES)
            parts.append(
                f"{self.watched} of the {self.updated} tensors of the optimizer watched"
                + (f", without {left_out}" if left_out else "")
            )
        if not self.has_losses:
            parts.append(f"a loss was recorded in {_of(self.losses, self.steps)}")
        return ", ".join(parts)

    @property
    def verdict(self) -> str:
        """The verdict without any finding, in a clause."""
        if not self.enough:
            return f"not enough was measured to judge: {self.limits}"
        return f"no fault found{f', but {self.limits}' if self.limits else ''}"


class CoverageCount:
    """Counts what is measured of a run, step by step."""

    def __init__(self, training: Any) -> None:
        self._tensors = _tensors(training)
        self._steps = self._losses = self._due = self._gradients = 0

    def add(self, report: StepReport) -> None:
        """Count a step."""
        due = report.step % max(report.gathered.interval, 1) == 0
        self._steps += 1
        self._losses += bool(np.isfinite(report.values["loss_mean"]))
        self._due += due
        self._gradients += due and report.observed

    @property
    def coverage(self) -> MeasuredParts:
        """What was measured so far."""
        counts = (self._steps, self._losses, self._due, self._gradients)
        return MeasuredParts(*counts, *self._tensors)


def coverage_of(run: Run, columns: Columns | None = None) -> MeasuredParts:
    """Return what was measured in a run, from :data:`COLUMNS` of its steps if they are at hand."""
    columns = run.steps(*COLUMNS) if columns is None else columns
    due_T = columns["step"] % np.maximum(columns["interval"], 1) == 0
    return MeasuredParts(
        len(due_T),
        int(np.isfinite(columns["loss_mean"]).sum()),
        int(due_T.sum()),
        int((due_T & columns["observed"]).sum()),
        *_tensors(run.info.get("training")),
    )


def _tensors(training: Any) -> tuple[int, int, tuple[str, ...]]:
    """Return the tensors of model and optimizer, if that has more, and names of unwatched ones."""
    try:
        optimizer = training["optimizer"]
        watched = int(training["parameters"]["tensors"])
        updated = sum(int(group["tensors"]) for group in optimizer["groups"])
        unwatched = tuple(map(str, training.get("unwatched", ())))
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0, 0, ()
    return (watched, updated, unwatched) if watched < updated else (0, 0, ())


def _of(number: int, whole: int) -> str:
    return f"{f'{number:,}' if number else 'none'} of {count(whole, 'step')}"
