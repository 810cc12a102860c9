"""From replicas along a mesh's axis to findings: partial gradients, parameters that differ."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.rules import finding_of
from rankscope.bus.words import count, listed, name_ranks
from rankscope.evidence.mesh.part import Replicated

PARTIAL = "sync.partial_gradient"
DIFFER = "state.replicas_differ"

_PART = 0.25
"""Relative distance from which on gradients count as parts of one."""

_MUCH = 4  # times as far apart
_CYCLE = 64  # steps in which most parameters are read once
_MOST_NAMED = 3
_MOST_LINES = 3
_MOST_RECORDED = 64

_Line = tuple[int, ...]  # ranks of the job along an axis


@dataclass(slots=True)
class _Fault:
    """One kind of difference along an axis.

    Attributes:
        first: The first step that shows it.
        severity: Its severity.
        last: The last step that shows it.
        count: The number of steps that show it.
        apart: The largest distance of each parameter, by name.
        lines: By ranks along the axis, those that differ from most.
        reported: The summary of the last report.
    """

    first: int
    severity: Severity
    last: int = -1
    count: int = 0
    apart: dict[str, float] = field(default_factory=dict)
    lines: dict[_Line, tuple[int, ...]] = field(default_factory=dict)
    reported: object = None

    def add(self, step: int, one: Replicated, apart: float, wait: int) -> None:
        """Add a parameter, unless it is new more than ``wait`` steps later: a consequence."""
        if one.name not in self.apart and step > self.first + wait:
            return
        self.first = min(self.first, step)
        self.count += step > self.last
        self.last = max(self.last, step)
        self.apart[one.name] = max(apart, self.apart.get(one.name, 0.0))
        self.lines[one.ranks] = one.odd

    def has_changed(self, *, everywhere: bool) -> bool:
        """Return whether it has changed since the last report, and note this one.

        ``everywhere``: all ranks differ that hold some of its parameters.
        """
        counted = self.count.bit_length()
        summary = (self.severity, tuple(self.apart), dict(self.lines), counted, everywhere)
        changed = summary != self.reported
        self.reported = summary
        return changed


class AxisVerdict:
    """Judges what ranks replicate over one axis, step by step.

    A gradient that differs while all parameters agree is partial: as a consequence, its parameters
    drift from then on, and with them every other gradient. If parameters differ first, gradients
    differ as a consequence. The run's first step reads all of them, and shows which came first. In
    later steps, which read some, gradients count as partial if they are as far apart as parts, and
    much farther than their parameters; others count as a consequence.

    If the axis cuts no parameter, the ranks along it may not share one model. A parameter that
    begins with other values there may be intended, and gradients are not judged.

    ``begun_at`` is the first step of the run.
    """

    def __init__(self, axis: str, begun_at: int) -> None:
        self._axis = axis
        self._begun_at = begun_at
        self._partial: _Fault | None = None
        self._differ: _Fault | None = None
        self._met: dict[_Line, set[str]] = defaultdict(set)
        self._held: dict[str, set[_Line]] = defaultdict(set)  # by ranks along the axis
        self._own: set[_Line] = set()  # their models may differ on purpose

    def observe(
        self, step: int, found: Sequence[Replicated], workers: Mapping[int, int]
    ) -> list[Finding]:
        """Process the replicas of some ranks along the axis in a step.

        Args:
            step: The step; those of the same ranks come in order.
            found: Their replicas, of one parameter at least.
            workers: Workers of this run, by rank in the job.

        Returns:
            Findings that are new, or have changed.
        """
        met = self._met[found[0].ranks]
        begun = [one for one in found if one.name not in met and one.parameter_differs]
        if any(not _is_meant(one) for one in begun):
            self._own.add(found[0].ranks)
        self._see_gradients(step, found, begins=not met)
        self._see_parameters(step, found, met)
        met |= {one.name for one in found}
        for one in found:
            if one.held:
                self._held[one.name].add(one.ranks)
        return list(self._changed(step, workers))

    def _see_gradients(self, step: int, found: Sequence[Replicated], *, begins: bool) -> None:
        apart = begins and any(one.parameter_differs for one in found)
        if self._differ is not None or apart or found[0].ranks in self._own:
            return
        for one in found:
            part = one.gradient > max(_PART, _MUCH * one.parameter) or begins
            if one.gradient_differs and part:
                self._partial = self._partial or _Fault(step, Severity.ERROR)
                self._partial.add(step, one, one.gradient, _CYCLE)

    def _see_parameters(self, step: int, found: Sequence[Replicated], met: set[str]) -> None:
        for one in found:
            if one.parameter_differs and self._partial is None:
                self._differ = self._differ or _Fault(step, Severity.WARNING)
                if _is_meant(one) or one.name in met:
                    self._differ.severity = Severity.ERROR
                self._differ.add(step, one, one.parameter, 0)

    def _changed(self, step: int, workers: Mapping[int, int]) -> Iterator[Finding]:
        for cause, fault in ((PARTIAL, self._partial), (DIFFER, self._differ)):
            if fault is None or fault.last != step:
                continue
            met = {rank for line in self._met for rank in line}
            everywhere = workers.keys() <= met and all(
                self._held[name] <= fault.lines.keys() for name in fault.apart
            )
            if fault.has_changed(everywhere=everywhere):
                yield self._finding(cause, fault, workers, everywhere=everywhere)

    def _finding(
        self, cause: str, fault: _Fault, workers: Mapping[int, int], *, everywhere: bool
    ) -> Finding:
        concerned = {rank for line in fault.lines for rank in line}
        ranks = tuple(sorted(worker for rank, worker in workers.items() if rank in concerned))
        names = list(fault.apart)
        apart = max(fault.apart.values())
        more = [count(len(names) - _MOST_NAMED, "other")] if len(names) > _MOST_NAMED else []
        finite = math.isfinite(apart)
        numbers = {
            "axis": self._axis,
            "parameters": names[:_MOST_RECORDED],
            "apart": apart if finite else None,
            "lines": [list(line) for line in sorted(fault.lines)[:_MOST_RECORDED]],
        }
        fields = {
            "axis": self._axis,
            "names": listed([*names[:_MOST_NAMED], *more]),
            "where": _where(fault.lines),
            "apart": f"by {apart:.2g} of their norm" if finite else "since some have none",
        }
        evidence = FaultEvidence(
            cause, fault.severity, ranks, fault.first, fault.last, fault.count, fields, numbers
        )
        name = f"{cause}:{self._axis}"
        finding = finding_of(evidence, fault.last, name=name, begun_at=self._begun_at)
        return replace(finding, ranks=()) if everywhere or len(ranks) == len(workers) else finding


def _is_meant(one: Replicated) -> bool:
    """Return whether a parameter has to be equal along the axis."""
    return one.placed or one.cuts


def _where(lines: Mapping[_Line, tuple[int, ...]]) -> str:
    """Return the ranks of the job that differ, in words: ``ranks 0 and 1, and ranks 2 and 3``.

    If most ranks along an axis agree, those that do not are named: ``rank 3 from ranks 0–2``.
    """
    parts = []
    for line, odd in sorted(lines.items())[:_MOST_LINES]:
        rest = [rank for rank in line if rank not in odd]
        parts.append(f"{name_ranks(odd)} from {name_ranks(rest)}" if rest else name_ranks(line))
    more = len(lines) - len(parts)
    words = ", and ".join(parts)
    return f"{words}, and {count(more, 'other group')}" if more > 0 else words
