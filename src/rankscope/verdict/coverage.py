"""What of a run was checked and measured, so that silence is never taken for health.

Each judge declares the number of steps it needs. A verdict covers no more than what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.bus.detector import Check, CheckedRun
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import StepReport
from rankscope.bus.words import count, listed, shortened
from rankscope.evidence import EVIDENCE
from rankscope.record import Run
from rankscope.record.tables import Columns


def checks_of(
    num_workers: int,
    options: object,
    *,
    samples: bool = True,
    canaries: bool | None = None,
    unmeasured: object = None,
) -> tuple[Check, ...]:
    """Return the checks of a run, see :class:`rankscope.bus.detector.CheckedRun`."""
    if num_workers < 2:
        return ()
    given = options if isinstance(options, Mapping) else {}
    reasons = unmeasured if isinstance(unmeasured, Mapping) else {}
    run = CheckedRun(num_workers, given, samples, canaries, reasons)
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


# of the steps table, from which the coverage follows
COLUMNS = (
    *("step", "loss_mean", "loss_std", "grad_norm_mean", "grad_norm_std", "observed", "interval"),
    "samples_drawn",
)

_NAMES = 3
OF_OPTIMIZER = "tensors of the optimizer"
_REDUCED = (
    "all workers held the same gradient at the end of backward, as where hooks reduce it, so no "
    "worker's own is known"
)


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
    what: str = OF_OPTIMIZER  # of which they are some
    updated: int = 0  # tensors of the optimizer, or that have joined the training, likewise
    unwatched: tuple[str, ...] = ()  # names of some of those that are not watched
    joined_by: int | None = None  # the step by which they had joined the training; None if before
    joined_after: int = 0  # recorded steps until then
    identified: bool = True  # the samples of some step were, or they cannot differ
    alike: int = 0  # steps in which all workers had other losses and one gradient

    @property
    def enough(self) -> bool:
        """Whether the run can be judged: half of the due steps and of the tensors were measured.

        Tensors that joined the training count in the steps since then.
        """
        before = min(self.joined_after, self.steps)
        trained = self.watched * before + self.updated * (self.steps - before)
        return self.has_gradients and 2 * self.watched * self.steps >= trained

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were measured in half of the steps in which they were due."""
        return self.gradients > 0 and self.due <= 2 * self.gradients

    @property
    def are_reduced(self) -> bool:
        """Whether backward passes leave the reduced gradient, so that no worker's own is known."""
        return 2 * self.alike > self.gradients

    @property
    def has_losses(self) -> bool:
        """Whether half of the steps have a loss."""
        return self.losses > 0 and self.steps <= 2 * self.losses

    @property
    def severity(self) -> Severity | None:
        """The severity of what is missing: too much to judge the run, or a part of it."""
        if not self.enough:
            return Severity.WARNING
        return Severity.NOTE if self.updated or self.are_reduced else None

    @property
    def limits(self) -> str:
        """What limits the verdict, in a clause; empty if nothing does."""
        parts = []
        if not self.has_gradients:
            parts.append(f"gradients were measured in {_of(self.gradients, self.due)}")
        if self.are_reduced:
            parts.append(_REDUCED)
        if self.watched < self.updated:
            parts.append(f"{self.watched} of the {self.updated} {self.what} watched{self.left_out}")
        if not self.has_losses:
            parts.append(f"a loss was recorded in {_of(self.losses, self.steps)}")
        if not self.identified:
            parts.append("samples were identified in no step")
        return ", ".join(parts)

    @property
    def leaves_models_out(self) -> bool:
        """Whether optimizers update parameters that are not watched."""
        return self.joined_by is not None or (
            self.watched < self.updated and self.what == OF_OPTIMIZER
        )

    @property
    def left_out(self) -> str:
        """The tensors that are not watched, in a clause; empty if no name is known."""
        if not self.unwatched:
            return ""
        if self.joined_by is None:
            return f", without {shortened(self.unwatched, _NAMES)}"
        names = list(self.unwatched[:_NAMES])
        more = self.updated - self.watched - len(names)
        all_words = listed([*names, *([count(more, "other")] if more else [])])
        return f", without {all_words}, trained since step {self.joined_by:,} or before"

    @property
    def verdict(self) -> str:
        """The verdict without any finding, in a clause."""
        if not self.enough:
            return f"not enough was measured to judge: {self.limits}"
        hint = "" if self.has_losses else "; scope.loss gives it where the loop computes it"
        hint += "" if self.identified else "; scope.batch names them"
        return f"no fault found{f', but {self.limits}{hint}' if self.limits else ''}"


class CoverageCount:
    """Counts what is measured of a run, step by step.

    Attributes:
        joined: The ``joined`` of ``run.json``: tensors that are trained and were not when the
            session began, since which step, and names of some.
    """

    def __init__(self, training: Any, num_workers: int) -> None:
        self._identified = num_workers < 2
        self.joined: dict[str, Any] = {}
        self._training = training
        self._steps = self._losses = self._due = self._gradients = self._alike = 0

    def add(self, report: StepReport) -> bool:
        """Count a step; return whether ``joined`` has changed with it."""
        due = report.step % max(report.gathered.interval, 1) == 0
        self._steps += 1
        self._losses += bool(np.isfinite(report.values["loss_mean"]))
        self._due += due
        self._identified |= bool(report.values["samples_drawn"] > 0)
        self._gradients += due and report.observed
        self._alike += bool(due and _are_alike(report.values))
        rows = [row for row in report.gathered.differences if row.kind is StateKind.JOINED]
        if rows:
            self.joined = {
                "step": self.joined.get("step", report.step),
                "steps": self.joined.get("steps", self._steps - 1),
                "tensors": int(max(row.digests_W.max() for row in rows)),
                "names": [row.name.partition(": ")[2] for row in rows],
            }
        return bool(rows)

    @property
    def coverage(self) -> MeasuredParts:
        """What was measured so far."""
        counts = (self._steps, self._losses, self._due, self._gradients)
        return MeasuredParts(
            *counts,
            **_tensors(self._training, self.joined),
            identified=self._identified or not self._steps,
            alike=self._alike,
        )


def coverage_of(run: Run, columns: Columns | None = None) -> MeasuredParts:
    """Return what was measured in a run, from :data:`COLUMNS` of its steps if they are at hand."""
    columns = run.steps(*COLUMNS) if columns is None else columns
    due_T = columns["step"] % np.maximum(columns["interval"], 1) == 0
    return MeasuredParts(
        len(due_T),
        int(np.isfinite(columns["loss_mean"]).sum()),
        int(due_T.sum()),
        int((due_T & columns["observed"]).sum()),
        **_tensors(run.info.get("training"), run.info.get("joined")),
        identified=run.num_workers < 2
        or not len(due_T)
        or bool((columns["samples_drawn"] > 0).any()),
        alike=int((due_T & _are_alike(columns)).sum()),
    )


def _are_alike(values: Mapping[str, Any]) -> Any:
    """Return whether workers with different losses have one gradient; NaN is none."""
    equal = (values["grad_norm_std"] == 0) & (values["grad_norm_mean"] > 0)
    return equal & (values["loss_std"] > 0)


def _tensors(training: Any, joined: Any) -> dict[str, Any]:
    """Return the fields of :class:`MeasuredParts` on tensors, where not all trained are watched.

    Where tensors have joined the training, those that were trained at its beginning are watched.
    """
    try:
        if joined:
            watched = int(training["parameters"]["trained_tensors"])
            return {
                "watched": watched,
                "updated": watched + int(joined["tensors"]),
                "unwatched": tuple(map(str, joined["names"])),
                "what": "trained tensors",
                "joined_by": int(joined["step"]),
                "joined_after": int(joined["steps"]),
            }
        unheld = training.get("unheld")
        if unheld:
            updated = int(training["parameters"]["trained_tensors"])
            return {
                "watched": updated - int(unheld["tensors"]),
                "updated": updated,
                "unwatched": tuple(map(str, unheld["names"])),
                "what": "trained tensors",
            }
        optimizer = training["optimizer"]
        watched = int(training["parameters"]["tensors"])
        updated = sum(int(group["tensors"]) for group in optimizer["groups"])
        unwatched = tuple(map(str, training.get("unwatched", ())))
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    if watched >= updated:
        return {}
    return {"watched": watched, "updated": updated, "unwatched": unwatched}


def _of(number: int, whole: int) -> str:
    return f"{f'{number:,}' if number else 'none'} of {count(whole, 'step')}"
