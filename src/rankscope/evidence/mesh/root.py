"""Collects at one root the replicas of several runs over a mesh's axes, and compares them.

Each data-parallel group records a run of its own. The root of the mesh's first one also receives
the others' replicas, directly from their ranks.
"""

import logging
from collections.abc import Callable

from rankscope.bus.finding import Finding
from rankscope.bus.packing import PackedError
from rankscope.bus.probe import DirectedRun, Director
from rankscope.evidence.mesh.compare import AxisVerdict
from rankscope.evidence.mesh.drift import TieVerdict
from rankscope.evidence.mesh.part import AxisPart, compare_along

_log = logging.getLogger("rankscope")

_MOST_WAITING = 1024  # incomplete steps of ranks along an axis


class MeshAxes(Director):
    """The replicas over the axes of one mesh.

    ``report`` takes each finding that has changed.
    """

    def __init__(self, first_step: int, report: Callable[[Finding], None]) -> None:
        self._first_step = first_step
        self._report = report
        self._parts: dict[tuple[int, str, tuple[int, ...]], dict[int, AxisPart]] = {}
        self._workers: dict[int, int] = {}
        self._verdicts: dict[str, AxisVerdict | TieVerdict] = {}
        self.findings: dict[str, Finding] = {}

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Process a rank's :class:`AxisPart` of a step; ``rank`` is None in another run."""
        try:
            part = AxisPart.unpack(content)
        except PackedError as error:
            _log.debug("what a rank sent of its mesh cannot be read: %s", error)
            return
        if rank is not None:
            self._workers[part.rank] = rank
        for axis, ranks in part.axes.items():
            parts = self._parts.setdefault((step, axis, ranks), {})
            parts[part.rank] = part
            if all(each in parts for each in ranks):
                del self._parts[step, axis, ranks]
                self._compare(step, axis, [parts[each] for each in ranks])
        if len(self._parts) > _MOST_WAITING:
            del self._parts[min(self._parts)]

    def _compare(self, step: int, axis: str, parts_T: list[AxisPart]) -> None:
        try:
            found = compare_along(axis, parts_T)
        except (ValueError, KeyError) as error:
            _log.debug("what ranks replicate over %s cannot be compared: %s", axis, error)
            return
        if not found:
            return
        verdict = self._verdicts.get(axis)
        if verdict is None:
            shared = parts_T[0].shared
            verdict = self._verdicts[axis] = (
                AxisVerdict(axis, self._first_step)
                if shared is None
                else TieVerdict(axis, self._first_step, shared)
            )
        for finding in verdict.observe(step, found, self._workers):
            self.findings[finding.id] = finding
            self._report(finding)


def make_director(run: DirectedRun) -> MeshAxes:
    """Return the director that compares replicas over a mesh's other axes."""
    return MeshAxes(run.first_step, run.report)
