"""From weights that pipeline stages share to a finding: they drift apart."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.rules import finding_of
from rankscope.bus.words import count, listed, name_ranks
from rankscope.evidence.mesh.part import Replicated

APART = "sync.tied_weights"

_MOST_NAMED = 3
_MOST_LINES = 3
_MOST_RECORDED = 64

_Line = tuple[int, ...]  # ranks of the job along the axis


@dataclass(slots=True)
class _Weight:
    """A weight of several stages on the ranks of one line.

    Attributes:
        begun: Digest of its first values.
        kept: Whether an update has changed it, and left it equal.
        gradients: Distance and factor of the first gradients that differ; None if none did.
        compared: Whether all ranks had a gradient at some time.
    """

    begun: int
    kept: bool = False
    gradients: tuple[float, float] | None = None
    compared: bool = False


@dataclass(slots=True)
class _Drift:
    """The weights that have drifted apart.

    Attributes:
        first: The first step that shows it.
        last: The last step that shows it.
        count: The number of steps that show it.
        apart: The largest distance of each weight, by label.
        lines: The ranks that hold them.
        kept: Whether some had stayed equal over an update.
        gradients: Distance and factor of their gradients; None if these agreed, or are unknown.
        compared: Whether gradients were compared.
        reported: The summary of the last report.
    """

    first: int
    last: int = -1
    count: int = 0
    apart: dict[str, float] = field(default_factory=dict)
    lines: set[_Line] = field(default_factory=set)
    kept: bool = False
    gradients: tuple[float, float] | None = None
    compared: bool = False
    reported: object = None


class TieVerdict:
    """Judges the weights that pipeline stages share, step by step.

    Weights drift apart if their values differ by more than rounding, or if they differ at all after
    their gradients did. It is an error if an update had left them equal before, a warning if they
    only began alike, and a note if one seed or one layer explains that, too.

    Args:
        axis: The axis of the stages.
        begun_at: The first step of the run.
        certain: Labels of the weights whose equal content is no chance.
    """

    def __init__(self, axis: str, begun_at: int, certain: Sequence[str]) -> None:
        self._axis = axis
        self._begun_at = begun_at
        self._certain = frozenset(certain)
        self._weights: dict[tuple[_Line, str], _Weight | None] = {}
        self._drifts: dict[Severity, _Drift] = {}

    def observe(
        self, step: int, found: Sequence[Replicated], workers: Mapping[int, int]
    ) -> list[Finding]:
        """Process the weights of one line in a step; return findings that are new, or have changed.

        Args:
            step: The step; those of the same ranks come in order.
            found: Their values before the step, and their gradients at the optimizer's call.
            workers: Workers of this run, by rank in the job.
        """
        for one in found:
            key = one.ranks, one.name
            if key not in self._weights:  # else the script has loaded other values since
                self._weights[key] = _Weight(one.digest) if one.same else None
            weight = self._weights[key]
            if weight is not None:
                self._see(step, one, weight)
        return list(self._changed(step, workers))

    def _see(self, step: int, one: Replicated, weight: _Weight) -> None:
        if one.same:
            weight.kept = weight.kept or one.digest != weight.begun
        elif one.parameter_differs or weight.gradients is not None:
            certain = weight.kept or one.name in self._certain
            severity = Severity.WARNING if certain else Severity.NOTE
            drift = self._drifts.setdefault(severity, _Drift(step))
            drift.count += step > drift.last
            drift.last = max(drift.last, step)
            drift.apart[one.name] = max(one.parameter, drift.apart.get(one.name, 0.0))
            drift.lines.add(one.ranks)
            drift.kept |= weight.kept
            drift.gradients = drift.gradients or weight.gradients
            drift.compared |= weight.compared
        if math.isfinite(one.gradient):  # else some stage has none, or has cleared it
            weight.compared = True
            if one.gradient_differs and weight.gradients is None:
                weight.gradients = one.gradient, one.factor

    def _changed(self, step: int, workers: Mapping[int, int]) -> Iterator[Finding]:
        for severity, drift in self._drifts.items():
            counted = drift.count.bit_length()
            summary = tuple(drift.apart), frozenset(drift.lines), counted, drift.kept
            if drift.last == step and summary != drift.reported:
                drift.reported = summary
                yield self._finding(severity, drift, workers)

    def _finding(self, severity: Severity, drift: _Drift, workers: Mapping[int, int]) -> Finding:
        if drift.kept:
            severity = Severity.ERROR
        concerned = {rank for line in drift.lines for rank in line}
        ranks = tuple(sorted(worker for rank, worker in workers.items() if rank in concerned))
        labels = list(drift.apart)
        lines = sorted(drift.lines)
        more = [count(len(labels) - _MOST_NAMED, "other")] if len(labels) > _MOST_NAMED else []
        where = [name_ranks(line) for line in lines[:_MOST_LINES]]
        if len(lines) > _MOST_LINES:
            where.append(count(len(lines) - _MOST_LINES, "other group"))
        apart = max(drift.apart.values())
        numbers = {
            "axis": self._axis,
            "parameters": labels[:_MOST_RECORDED],
            "apart": apart if math.isfinite(apart) else None,
            "lines": [list(line) for line in lines[:_MOST_RECORDED]],
        }
        fields = {
            "axis": self._axis,
            "names": listed([*labels[:_MOST_NAMED], *more]),
            "where": ", and ".join(where),
            "apart": f"{apart:.2g}",
            "why": _why(drift, self._axis),
            "begun": "an update had left them equal" if drift.kept else "they began alike",
        }
        evidence = FaultEvidence(
            APART, severity, ranks, drift.first, drift.last, drift.count, fields, numbers
        )
        name = f"{APART}:{self._axis}" + ("" if severity > Severity.NOTE else ":note")
        finding = finding_of(evidence, drift.last, name=name, begun_at=self._begun_at)
        return replace(finding, ranks=()) if len(ranks) == len(workers) else finding


def _why(drift: _Drift, axis: str) -> str:
    """Return what the stages' optimizers were given."""
    if not drift.compared:
        return "Not all stages had a gradient of it when their optimizers were called"
    if drift.gradients is None:
        return "Their gradients agreed where they were compared"
    apart, factor = drift.gradients
    if math.isfinite(factor) and factor > 0:
        return (
            f"Their gradients were added up over {axis}, but scaled apart: one was {factor:.3g} "
            "times the other, as where each stage clips by its own norm"
        )
    return (
        f"Their gradients were not added up over {axis}: the optimizers got gradients that lay "
        f"apart by {apart:.2g} of their norm"
    )
