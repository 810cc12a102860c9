"""From replicas along a mesh's axis to findings: partial gradients, parameters that differ."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.rules import describe, go_back
from rankscope.bus.words import count, listed, name_ranks
from rankscope.evidence.mesh.part import Replicated

PARTIAL, DIFFER = "sync.partial_gradient", "state.replicas_differ"

_PART = 0.25
"""Relative distance of gradients from which on they are parts of one, whatever came before."""

_MUCH = 4  # times as far apart
_ROTATION = 64  # steps in which most parameters have a turn
_MOST_NAMED = 3
_MOST_LINES = 3
_MOST_RECORDED = 64

_Line = tuple[int, ...]  # ranks of the job along an axis


@dataclass(slots=True)
class _Fault:
    """What is known of one kind of difference along an axis.

    Attributes:
        first: The first step that shows it.
        severity: How bad it is.
        last: The last step that shows it.
        count: How many steps have shown it.
        apart: How far each parameter lies apart at most, by name.
        lines: By ranks along the axis, those that differ from most.
        told: What was told last.
    """

    first: int
    severity: Severity
    last: int = -1
    count: int = 0
    apart: dict[str, float] = field(default_factory=dict)
    lines: dict[_Line, tuple[int, ...]] = field(default_factory=dict)
    told: object = None

    def add(self, step: int, one: Replicated, apart: float, wait: int) -> None:
        """Take a parameter; one that is found more than ``wait`` steps later is a consequence."""
        if one.name not in self.apart and step > self.first + wait:
            return
        self.first = min(self.first, step)
        self.count += step > self.last
        self.last = max(self.last, step)
        self.apart[one.name] = max(apart, self.apart.get(one.name, 0.0))
        self.lines[one.ranks] = one.odd

    def news(self, *, everywhere: bool) -> bool:
        """Return whether there is something to tell, as if it were told now.

        Args:
            everywhere: Whether all ranks differ that hold something of its parameters.
        """
        counted = self.count.bit_length()
        told = (self.severity, tuple(self.apart), dict(self.lines), counted, everywhere)
        fresh, self.told = told != self.told, told
        return fresh


class AxisVerdict:
    """Judges what ranks replicate over one axis, step by step.

    A gradient that differs while all parameters agree is partial: its parameters drift from then
    on, and with them every other gradient, as a consequence. Where parameters differ first, it is
    their gradients that do so as a consequence. The run's first step has all of them, and shows
    which came first. Later they take turns; there, gradients that lie as far apart as parts do, and
    much farther than their parameters, count as partial, and others as a consequence.

    Where the axis cuts no parameter, nothing says that the ranks along it share one model. If a
    parameter begins with other values there, it may be meant, and gradients are not judged.

    Args:
        axis: Its name.
        begun_at: The first step of the run.
    """

    def __init__(self, axis: str, begun_at: int) -> None:
        self._axis, self._begun_at = axis, begun_at
        self._partial: _Fault | None = None
        self._differ: _Fault | None = None
        self._met: dict[_Line, set[str]] = defaultdict(set)
        self._held: dict[str, set[_Line]] = defaultdict(set)  # by ranks along the axis
        self._own: set[_Line] = set()  # whose models may be meant to differ

    def observe(
        self, step: int, found: Sequence[Replicated], workers: Mapping[int, int]
    ) -> list[Finding]:
        """Take what some ranks along the axis hold in a step.

        Args:
            step: The step; those of the same ranks come in order.
            found: What they hold, one parameter at least.
            workers: By rank in the job, the worker of this run that it is.

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
                self._partial.add(step, one, one.gradient, _ROTATION)

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
            known = {rank for line in self._met for rank in line}
            everywhere = workers.keys() <= known and all(
                self._held[name] <= fault.lines.keys() for name in fault.apart
            )
            if fault.news(everywhere=everywhere):
                yield self._finding(cause, fault, workers, everywhere=everywhere)

    def _finding(
        self, cause: str, fault: _Fault, workers: Mapping[int, int], *, everywhere: bool
    ) -> Finding:
        concerned = {rank for line in fault.lines for rank in line}
        ranks = tuple(sorted(worker for rank, worker in workers.items() if rank in concerned))
        names, apart = list(fault.apart), max(fault.apart.values())
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
        back = go_back(fault.first, self._begun_at)
        explanation, next_check = describe(cause, fault.severity, evidence.fields, back)
        return Finding(
            id=f"{cause}:{self._axis}",
            cause=cause,
            severity=fault.severity,
            ranks=() if everywhere or len(ranks) == len(workers) else ranks,
            first_step=fault.first,
            last_step=fault.last,
            explanation=explanation,
            next_check=next_check,
            evidence=numbers,
            step=fault.last,
        )


def _is_meant(one: Replicated) -> bool:
    """Return whether something says that a parameter is one along the axis."""
    return one.placed or one.cuts


def _where(lines: Mapping[_Line, tuple[int, ...]]) -> str:
    """Return which ranks of the job differ, as words: ``ranks 0 and 1, and ranks 2 and 3``.

    Where most ranks along an axis agree, those that do not are named: ``rank 3 from ranks 0–2``.
    """
    told = []
    for line, odd in sorted(lines.items())[:_MOST_LINES]:
        rest = [rank for rank in line if rank not in odd]
        told.append(f"{name_ranks(odd)} from {name_ranks(rest)}" if rest else name_ranks(line))
    more = len(lines) - len(told)
    words = ", and ".join(told)
    return f"{words}, and {count(more, 'other group')}" if more > 0 else words
