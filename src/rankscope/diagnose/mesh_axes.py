"""From replicas along a mesh's axis to findings: partial gradients, parameters that differ."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope.core.finding import Finding, Severity
from rankscope.core.mesh_axes import Replicated
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.rules import count, describe, go_back, listed, name_ranks

PARTIAL, DIFFER = "sync.partial_gradient", "state.replicas_differ"

_PART = 0.25
"""Relative distance of gradients from which on they are parts of one, whatever came before."""

_ROTATION = 64  # steps in which most parameters have a turn
_MOST_NAMED = 3
_MOST_LINES = 3


_Line = tuple[int, ...]  # ranks of the job along an axis


@dataclass(slots=True)
class _Fault:
    """What is known of one kind of difference along an axis."""

    first: int
    severity: Severity
    names: dict[str, float] = field(default_factory=dict)
    lines: dict[_Line, tuple[int, ...]] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    told: object = None

    def add(self, step: int, one: Replicated, apart: float, wait: int) -> None:
        """Take a parameter; one that is found more than ``wait`` steps later is a consequence."""
        if one.name not in self.names and step > self.first + wait:
            return
        self.names[one.name] = max(apart, self.names.get(one.name, 0.0))
        self.lines[one.ranks] = one.odd
        self.steps.add(step)


class AxisVerdict:
    """Judges what ranks replicate over one axis, step by step.

    A gradient that differs while all parameters agree is partial: its parameters drift from then
    on, and with them every other gradient, as a consequence. Where parameters differ first, it is
    their gradients that do so as a consequence. The run's first step has all of them, and shows
    which came first. Later they take turns; there, gradients that lie as far apart as parts do, and
    much farther than their parameters, count as partial, and others as a consequence.

    Args:
        axis: Its name.
        begun_at: The first step of the run.
    """

    def __init__(self, axis: str, begun_at: int) -> None:
        self._axis, self._begun_at = axis, begun_at
        self._faults: dict[tuple[str, bool], _Fault] = {}  # by cause, and whether it is one
        # By ranks along the axis: parameters that were compared before, and modules whose plain
        # parameters each rank may have for itself.
        self._met: dict[_Line, set[str]] = defaultdict(set)
        self._own: dict[_Line, set[str]] = defaultdict(set)

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
        self._see_own(found)
        differs = self._faults.get((DIFFER, True))
        if differs is None or differs.severity is Severity.WARNING:
            self._see_gradients(step, found)
        self._see_parameters(step, found)
        self._met[found[0].ranks] |= {one.name for one in found}
        return list(self._changed(step, workers))

    def _see_own(self, found: Sequence[Replicated]) -> None:
        """Note what each rank may have for itself: plain parameters that begin differently."""
        line = found[0].ranks
        self._own[line] |= {
            _module_of(one.name)
            for one in found
            if _is_plain(one) and one.parameter_differs and one.name not in self._met[line]
        }

    def _see_parameters(self, step: int, found: Sequence[Replicated]) -> None:
        partial = (PARTIAL, True) in self._faults
        for one in found:
            if not one.parameter > 0:
                continue
            if not one.parameter_differs:
                self._note(DIFFER, step, one, one.parameter, is_fault=False)
            elif not partial:
                fault = self._note(DIFFER, step, one, one.parameter)
                if not _is_plain(one) or one.name in self._met[one.ranks]:
                    fault.severity = Severity.ERROR

    def _see_gradients(self, step: int, found: Sequence[Replicated]) -> None:
        line = found[0].ranks
        begins = not self._met[line]
        if begins and any(one.parameter_differs and not _is_plain(one) for one in found):
            return
        for one in found:
            own = _is_plain(one) and _module_of(one.name) in self._own[line]
            part = one.gradient > max(_PART, 4 * one.parameter) or begins
            if one.gradient_differs and part and not own:
                self._note(PARTIAL, step, one, one.gradient)

    def _note(
        self, cause: str, step: int, one: Replicated, apart: float, *, is_fault: bool = True
    ) -> _Fault:
        least = Severity.ERROR if cause == PARTIAL else Severity.WARNING
        fault = self._faults.setdefault((cause, is_fault), _Fault(step, least))
        fault.add(step, one, apart, 0 if is_fault and cause == DIFFER else _ROTATION)
        return fault

    def _changed(self, step: int, workers: Mapping[int, int]) -> Iterator[Finding]:
        for (cause, is_fault), fault in self._faults.items():
            if not is_fault and any(real for _, real in self._faults):
                continue
            severity = fault.severity if is_fault else Severity.NOTE
            doubled = len(fault.steps).bit_length()
            told = (severity, tuple(fault.names), tuple(fault.lines.items()), doubled)
            if step in fault.steps and told != fault.told:
                fault.told = told
                yield self._finding(cause, severity, fault, step, workers)

    def _finding(
        self, cause: str, severity: Severity, fault: _Fault, step: int, workers: Mapping[int, int]
    ) -> Finding:
        concerned = {rank for line in fault.lines for rank in line}
        ranks = tuple(sorted(worker for rank, worker in workers.items() if rank in concerned))
        everyone = len(ranks) == len(workers)
        names = list(fault.names)
        more = len(names) - _MOST_NAMED
        apart = max(fault.names.values())
        numbers = {
            "axis": self._axis,
            "parameters": names[:64],
            "apart": apart if math.isfinite(apart) else None,
            "lines": [list(line) for line in sorted(fault.lines)[:64]],
        }
        fields = {
            "axis": self._axis,
            "names": listed(names[:_MOST_NAMED] + ([count(more, "other")] if more > 0 else [])),
            "where": _where(fault.lines),
            "apart": f"by {apart:.2g} of their norm" if math.isfinite(apart) else "entirely",
        }
        evidence = Evidence(
            cause, severity, ranks, fault.first, step, len(fault.steps), fields, numbers
        )
        back = go_back(fault.first, self._begun_at)
        explanation, next_check = describe(cause, severity, evidence.fields, back)
        return Finding(
            id=f"{cause}:{self._axis}",
            cause=cause,
            severity=severity,
            ranks=() if everyone else ranks,
            first_step=fault.first,
            last_step=step,
            explanation=explanation,
            next_check=next_check,
            evidence=numbers,
            step=step,
        )


def _where(lines: Mapping[tuple[int, ...], tuple[int, ...]]) -> str:
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


def _is_plain(one: Replicated) -> bool:
    """Return whether nothing says that a parameter is meant to be equal along the axis."""
    return not one.placed and not one.cuts


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
