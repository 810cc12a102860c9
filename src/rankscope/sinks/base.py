"""The protocol of a sink, and the plain values that it gets.

All names of numbers are derived from the signal registry:

======================================  =======================================================
``rankscope/<column>``                  a column of the steps table
``rankscope/findings_<severity>``       open findings of that severity
``rankscope_workers/<column>/<which>``  ``min``, ``mean`` or ``max`` over the workers
``rankscope_ranks/<column>/<rank>``     the value of a worker that a finding has named
======================================  =======================================================

C columns of the workers table that are shown, W workers, R ranks whose own values are shown.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rankscope.bus.evidence import Column, DType, Source, Table, Tail
from rankscope.bus.finding import Finding, FindingEvent, FindingEvents, Severity
from rankscope.bus.step import StepReport
from rankscope.bus.words import name_ranks
from rankscope.errors import RankscopeError
from rankscope.evidence import columns_of
from rankscope.files import to_plain
from rankscope.stats.arrays import MISSING_INT, Floats

_NUMBERS = (DType.INT, DType.FLOAT, DType.BOOL)

STEP_SIGNALS: tuple[Column, ...] = tuple(
    s for s in columns_of(Table.STEPS) if s.dtype in _NUMBERS and s.name not in ("step", "time")
)
"""Columns of the steps table for sinks: all numbers but the two that are an axis."""

WORKER_SIGNALS: tuple[Column, ...] = tuple(
    s for s in columns_of(Table.WORKERS) if s.dtype in _NUMBERS and s.tail is not Tail.NONE
)
"""Columns of the workers table for sinks: those in which a worker can stand out."""

SPREAD = ("min", "mean", "max")

MAX_RANKS = 64  # with more workers, a step only holds the values of those named by findings
MAX_NAMED = 16  # most ranks named by findings whose own values are shown; the first ones count

_COLUMN = {signal.name: index for index, signal in enumerate(WORKER_SIGNALS)}


class SinkError(RankscopeError):
    """A sink cannot go on; its message goes to the log without a traceback."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run as a sink gets it, once, before the first step.

    Attributes:
        run_dir: The run's directory.
        num_workers: W.
        config: The user's description of the run.
        options: The options of ``watch``.
        findings: Findings from before a restart; they are no news.
    """

    run_dir: Path
    num_workers: int
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """One signal over the workers that have a value in a step."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class StepValues:
    """One step for sinks, without undefined and non-finite values (never a 0 instead).

    Attributes:
        step: Step number.
        time: Unix time in seconds at which the step was gathered.
        observed: Whether gradients were measured.
        values: The steps table's numbers by column.
        open_findings: Number of open findings by severity.
        named: Ranks that findings have named so far, 16 at most.
        ranks: Ranks with own values ``[R]``: all up to 64 workers, else the named ones.
        spread_CX: Smallest, mean and largest value over the workers, NaN without any.
        values_CR: Values by column and rank, NaN where there is none.
    """

    step: int
    time: float
    observed: bool
    values: Mapping[str, float]
    open_findings: Mapping[Severity, int]
    named: tuple[int, ...]
    ranks: tuple[int, ...]
    spread_CX: Floats
    values_CR: Floats

    def spread(self, column: str) -> Spread | None:
        """Return the spread of one signal over the workers; None where none has a value."""
        low, mean, high = self.spread_CX[_COLUMN[column]].tolist()
        return Spread(low, mean, high) if isfinite(mean) else None

    def by_rank(self, column: str) -> dict[int, float]:
        """Return the values of one signal by rank, of ranks with own values."""
        values = self.values_CR[_COLUMN[column]].tolist()
        pairs = zip(self.ranks, values, strict=True)
        return {rank: value for rank, value in pairs if isfinite(value)}

    def flat(self) -> dict[str, float]:
        """Return all numbers by their names in trackers."""
        return dict(self._named_values())

    def _named_values(self) -> Iterator[tuple[str, float]]:
        for column, value in self.values.items():
            yield f"rankscope/{column}", value
        for severity in Severity:
            yield f"rankscope/findings_{severity}", float(self.open_findings.get(severity, 0))
        places = [(rank, self.ranks.index(rank)) for rank in self.named if rank in self.ranks]
        spreads = self.spread_CX.tolist()
        values = self.values_CR
        for index, signal in enumerate(WORKER_SIGNALS):
            for which, value in zip(SPREAD, spreads[index], strict=True):
                if isfinite(value):
                    yield f"rankscope_workers/{signal.name}/{which}", value
            for rank, place in places:
                if isfinite(value := float(values[index, place])):
                    yield f"rankscope_ranks/{signal.name}/{rank}", value


@runtime_checkable
class Sink(Protocol):
    """A destination of the numbers.

    All methods are called in one thread of the sink's own, one after the other. They may be slow
    and may raise: a sink that raises is closed and not called again. A sink with an attribute
    ``takes_steps = False`` gets findings only.
    """

    def open(self, run: RunInfo) -> None:
        """Begin; called once, before anything else."""

    def step(self, step: StepValues) -> None:
        """Take the values of a step. Steps come in order; a slow sink misses some."""

    def finding(self, finding: Finding) -> None:
        """Take a finding that opened or changed; a later one with the same id replaces it."""

    def close(self) -> None:
        """End; called once, also after a failure."""


def step_values(
    report: StepReport,
    named: Iterable[int] = (),
    open_findings: Mapping[Severity, int] | None = None,
) -> StepValues:
    """Return the values of a step for sinks, as copies of bounded size.

    Args:
        report: The step.
        named: Ranks that findings have named.
        open_findings: Number of open findings by severity.
    """
    named = tuple(named)
    num_workers = report.gathered.num_workers
    values_CW = _worker_values(report)
    ranks = tuple(range(num_workers)) if num_workers <= MAX_RANKS else named
    return StepValues(
        step=int(report.step),
        time=float(report.time),
        observed=bool(report.observed),
        values=_step_values(report),
        open_findings=dict(open_findings or {}),
        named=named,
        ranks=ranks,
        spread_CX=_spread(values_CW),
        values_CR=values_CW[:, list(ranks)],
    )


def plain_finding(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain JSON; non-finite numbers are None."""
    plain: dict[str, Any] = to_plain(finding.to_json())
    return plain


def _step_values(report: StepReport) -> dict[str, float]:
    values = {**report.values, "observed": report.observed}
    numbers = ((signal.name, float(values[signal.name])) for signal in STEP_SIGNALS)
    return {name: value for name, value in numbers if isfinite(value)}


def _worker_values(report: StepReport) -> Floats:
    """Return the workers' values ``[C, W]``, NaN where there is none that is finite."""
    values_CW = np.empty((len(WORKER_SIGNALS), report.gathered.num_workers))
    for row, signal in zip(values_CW, WORKER_SIGNALS, strict=True):
        local = signal.source is Source.LOCAL
        values = (report.gathered.workers if local else report.derived)[signal.name]
        row[:] = values
        if signal.dtype is DType.INT:
            row[values == MISSING_INT] = np.nan
    values_CW[~np.isfinite(values_CW)] = np.nan
    return values_CW


def _spread(values_CW: Floats) -> Floats:
    counts_C = np.isfinite(values_CW).sum(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        means_C = np.nansum(values_CW, axis=1) / np.where(counts_C, counts_C, np.nan)
    low_C = np.fmin.reduce(values_CW, axis=1)
    high_C = np.fmax.reduce(values_CW, axis=1)
    return np.stack([low_C, means_C, high_C], axis=1)


class NewsSink(ABC):
    """A sink for findings that open, get worse or close; a subclass may also take steps.

    Findings that were never as severe as ``severity`` are left out.
    """

    takes_steps = False

    def __init__(self, severity: Severity = Severity.NOTE) -> None:
        self._severity = severity
        self._events = FindingEvents((), severity)
        self._info: RunInfo | None = None

    def open(self, run: RunInfo) -> None:
        """Keep the run and its known findings."""
        self._info = run
        self._events = FindingEvents(run.findings, self._severity)

    @property
    def run(self) -> RunInfo:
        """The run, from ``open``."""
        assert self._info is not None, "open comes first"
        return self._info

    def step(self, step: StepValues) -> None:  # noqa: B027 - as most of them do
        """Ignore a step."""

    def finding(self, finding: Finding) -> None:
        """Notify of a finding if it opened, got worse or closed."""
        event = self._events.of(finding)
        if event is not None and event.is_news:
            self.notify(finding, event)

    @abstractmethod
    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Notify of an event of a finding."""

    def close(self) -> None:  # noqa: B027 - not all hold something
        """End."""


def sentence(finding: Finding, event: FindingEvent | None = None) -> str:
    """Return a finding and its event (its status, if None) in one paragraph of plain text."""
    where = f" on {name_ranks(finding.ranks)}" if finding.ranks else ""
    return (
        f"{finding.severity}: {finding.cause} {event or finding.status}{where} "
        f"(steps {finding.first_step} to {finding.last_step}). {finding.explanation} "
        f"Next: {finding.next_check}"
    )
