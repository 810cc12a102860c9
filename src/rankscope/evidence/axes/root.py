"""Compares the ranks' shares of a step along the axes of a mesh."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.probe import DirectedRun, Director
from rankscope.bus.rules import finding_of
from rankscope.bus.words import count, name_ranks
from rankscope.evidence.axes.norms import NormOverMesh, WrongNorm
from rankscope.evidence.axes.share import AxesShare, loss_distance, lost_labels

_log = logging.getLogger("rankscope")

LOSSES = "loss.differs_along_axis"
LABELS = "loss.labels_lost"
NORM = "clip-norm-over-mesh"

_MOST_WAITING = 1024  # incomplete steps of ranks along an axis


@dataclass(slots=True)
class _Fault:
    """One kind of difference along an axis: its first step, and the number of steps."""

    first: int
    count: int = 0


class Axes(Director):
    """The shares along the axes of one mesh.

    ``report`` takes each finding that has changed.
    """

    def __init__(self, first_step: int, report: Callable[[Finding], None]) -> None:
        self._first_step = first_step
        self._report = report
        self._shares: dict[tuple[int, str, tuple[int, ...]], dict[int, AxesShare]] = {}
        self._faults: dict[str, _Fault] = {}
        self._norm = NormOverMesh()
        self.findings: dict[str, Finding] = {}

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Process a rank's share of a step."""
        try:
            share = AxesShare.from_json(json.loads(content))
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            _log.debug("what a rank sent of its mesh cannot be read: %s", error)
            return
        if share.squares is not None:
            wrong = self._norm.take(share.rank, step, share.squares, share.lines)
            if wrong is not None:
                self._add_norm(step, wrong)
        for axis, line in share.lines.items():
            shares = self._shares.setdefault((step, axis, line), {})
            shares[share.rank] = share
            if all(each in shares for each in line):
                del self._shares[step, axis, line]
                self._compare(step, axis, [shares[each] for each in line])
        if len(self._shares) > _MOST_WAITING:
            del self._shares[min(self._shares)]

    def _compare(self, step: int, axis: str, shares_T: Sequence[AxesShare]) -> None:
        line = [share.rank for share in shares_T]
        if axis in shares_T[0].cut and (apart := loss_distance(shares_T)):
            losses = [[f"{loss:.5g}" for loss in share.losses[:1]] for share in shares_T]
            drawn = {share.random for share in shares_T}
            fields = {
                "axis": axis,
                "ranks": name_ranks(line),
                "values": " against ".join(dict.fromkeys(one for each in losses for one in each)),
                "apart": f"{apart:.2g}",
                "why": _MASKS.format(axis=axis) if len(drawn) > 1 else _SUMS.format(axis=axis),
            }
            numbers = {"axis": axis, "ranks": line, "apart": apart}
            severity = Severity.ERROR if len(drawn) > 1 else Severity.WARNING
            self._add(LOSSES, axis, step, fields, numbers, severity)
        lost, offered = lost_labels(shares_T) if axis in shares_T[0].sequences else (0, 0)
        if lost:
            fields = {
                "axis": axis,
                "ranks": name_ranks(line),
                "kept": f"{offered - lost:,}",
                "offered": f"{offered:,}",
                "each": f"{lost // (len(line) - 1):,}",
            }
            self._add(LABELS, axis, step, fields, {"axis": axis, "lost": lost, "offered": offered})

    def _add_norm(self, step: int, wrong: WrongNorm) -> None:
        fields = {
            "norm": f"{wrong.norm:.3g}",
            "spread": f"{wrong.spread:.2g}",
            "how": _ALONE if wrong.alone else _TWICE.format(axis=wrong.axis),
            "steps": count(wrong.steps, "clipped step"),
        }
        numbers = {"axis": wrong.axis, "norm": wrong.norm}
        self._add("sync.clip_norm", wrong.axis, step, fields, numbers, key=NORM)

    def _add(
        self,
        cause: str,
        axis: str,
        step: int,
        fields: Mapping[str, object],
        numbers: Mapping[str, object],
        severity: Severity = Severity.WARNING,
        key: str = "",
    ) -> None:
        key = key or cause
        name = f"{key}:{axis}" if axis else key
        fault = self._faults.setdefault(name, _Fault(step))
        fault.first = min(fault.first, step)
        fault.count += 1
        if fault.count & (fault.count - 1):  # each doubling is news
            return
        numbers = {**numbers, "steps": fault.count}
        evidence = FaultEvidence(
            cause, severity, (), fault.first, step, fault.count, fields, numbers, key
        )
        finding = finding_of(evidence, step, name=name, begun_at=self._first_step)
        self.findings[name] = finding
        self._report(finding)


_ALONE = "only the ranks of one data-parallel group count in the norm"
_TWICE = "gradients that all ranks along {axis} hold alike count once for each of these ranks"
_MASKS = (
    "The forward pass draws random numbers, and their generators differ along {axis}: dropout of "
    "activations that all of these ranks hold needs equal masks. Seed the ranks along {axis} alike."
)
_SUMS = (
    "Look at what each of them computes from its own part without a sum over {axis}: a "
    "cross-entropy over a part of the vocabulary (also the mean of its label smoothing), a norm, a "
    "bias, an auxiliary loss."
)


def make_director(run: DirectedRun) -> Axes:
    """Return the director that compares what should agree along a mesh's axes."""
    return Axes(run.first_step, run.report)
