"""Compares at one root the replicas of several runs over a mesh's axes.

Each data-parallel group records a run of its own. The root of the mesh's first one also receives
the others' replicas, directly from their ranks.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.detector import PersistentFault, finding_of
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.probe import DirectedRun, Director
from rankscope.bus.replicas import minority_ranks
from rankscope.bus.shares import Packable, PackedError, Waiting
from rankscope.bus.words import MOST_RECORDED, count, name_ranks, shortened
from rankscope.stats.arrays import Floats, Floats32, Ints
from rankscope.stats.rounding import tolerance_of

_log = logging.getLogger("rankscope")

_PARTIAL = "sync.partial_gradient"
_DIFFER = "state.replicas_differ"
_TIED = "sync.tied_weights"

_MOST_WAITING = 1024  # incomplete steps of ranks along an axis
_PART = 0.25
"""Relative distance from which on gradients count as parts of one."""

_MUCH = 4  # times as far apart
_CYCLE = 64  # steps in which most parameters are read once
_MOST_NAMED = 3
_MOST_LINES = 3

_Line = tuple[int, ...]  # ranks of the job along an axis

_HELD = 1
_PLACED = 2


@dataclass(frozen=True, slots=True)
class AxisPart(Packable):
    """One rank's readings, in one step, of parameters that other ranks hold as well. A axes."""

    rank: int
    axes: Mapping[str, tuple[int, ...]]  # ranks of the job along each, this one among them
    layout: int  # digest of the names, shapes and placements of all of its parameters
    cut: tuple[str, ...]  # axes over which some of them are cut
    names: tuple[str, ...]
    types: tuple[str, ...]  # coarsest type in which each one's gradient is computed ``[N]``
    over_NA: NDArray[np.uint8]  # 0 cut over an axis, 1 whole on each rank, 2 stated by placement
    digests_2N: Ints  # of parameters before the step, and of gradients when applied
    norms_2N: Floats  # L2 norms of the same; NaN where there is none
    sketches_2NK: Floats32  # linear sketches of the same
    shared: tuple[str, ...] | None = None  # along pipeline stages: weights that they surely share

    @property
    def fits(self) -> bool:
        """Whether the shapes of the arrays fit each other."""
        count = len(self.names)
        return (
            len(self.types) == count
            and self.over_NA.shape == (count, len(self.axes))
            and self.digests_2N.shape == self.norms_2N.shape == (2, count)
            and self.sketches_2NK.ndim == 3
            and self.sketches_2NK.shape[:2] == (2, count)
        )


@dataclass(frozen=True, slots=True)
class Replicated:
    """One parameter on the ranks along an axis."""

    name: str
    ranks: tuple[int, ...]  # the ranks of the job along the axis ``[T]``
    placed: bool  # its placement is replicated; else it is a plain tensor
    cuts: bool  # the axis cuts other parameters, so that the ranks share one model
    parameter: float  # distance of the ranks' values before the step, relative to its norm
    gradient: float  # the same of the gradient at the optimizer's call; NaN if unknown
    odd: tuple[int, ...]  # the ranks that differ from most; all where no majority agrees
    tolerance: float  # distance that rounding may explain
    held: bool = True  # the ranks hold some elements: a shard of a small one may be empty
    same: bool = True  # the ranks' values before the step are the same in all bits
    digest: int = 0  # of the first rank's values
    factor: float = math.nan  # farthest rank's gradient over the first's; NaN if no multiple

    @property
    def parameter_differs(self) -> bool:
        """Whether its values differ by more than rounding explains."""
        return self.parameter > self.tolerance

    @property
    def gradient_differs(self) -> bool:
        """Whether its gradients differ by more than rounding explains."""
        return self.gradient > self.tolerance


def compare_along(axis: str, parts_T: Sequence[AxisPart]) -> list[Replicated]:
    """Return the parameters that are not cut over an axis, compared; none if the models differ."""
    first = parts_T[0]
    if any(part.layout != first.layout or part.names != first.names for part in parts_T):
        return []
    column = list(first.axes).index(axis)
    cuts = axis in first.cut
    return [
        _compare(name, number, parts_T, placed=first.over_NA[number, column] == _PLACED, cuts=cuts)
        for number, name in enumerate(first.names)
        if first.over_NA[number, column]
    ]


def _compare(
    name: str, number: int, parts_T: Sequence[AxisPart], *, placed: bool, cuts: bool
) -> Replicated:
    apart: list[float] = []
    factor = math.nan
    tolerance = max(tolerance_of(part.types[number]) for part in parts_T)
    differing: tuple[int, ...] = ()
    held = False
    for what in (0, 1):
        norms_T = np.array([part.norms_2N[what, number] for part in parts_T])
        digests_T = [int(part.digests_2N[what, number]) for part in parts_T]
        sketches_TK = np.array([part.sketches_2NK[what, number] for part in parts_T], np.float64)
        apart.append(_apart(digests_T, norms_T, sketches_TK))
        held |= bool((norms_T != 0).any())
        differing = minority_ranks(digests_T) or differing  # of the gradient, where it differs
        factor = _factor(sketches_TK, tolerance)
    values = [int(part.digests_2N[0, number]) for part in parts_T]
    return Replicated(
        name=name,
        ranks=tuple(part.rank for part in parts_T),
        placed=placed,
        cuts=cuts,
        parameter=apart[0],
        gradient=apart[1],
        odd=tuple(parts_T[at].rank for at in differing),
        tolerance=tolerance,
        held=held,
        same=len(set(values)) == 1,
        digest=values[0],
        factor=factor,
    )


def _apart(digests_T: Sequence[int], norms_T: Floats, sketches_TK: Floats) -> float:
    """Return the largest distance from the first rank's, relative to the largest norm.

    Infinite where some rank has none; NaN where no rank has one, or some are not finite.
    """
    missing_T = np.isnan(norms_T)
    if missing_T.any() or not np.isfinite(norms_T).all():
        return math.inf if 0 < missing_T.sum() < len(norms_T) else math.nan
    if len(set(digests_T)) == 1 or not norms_T.max():
        return 0.0
    distances_T = np.linalg.norm(sketches_TK - sketches_TK[0], axis=1)
    return float(distances_T.max() / norms_T.max())


def _factor(sketches_TK: Floats, tolerance: float) -> float:
    """Return the farthest rank's value over the first one's; NaN if it is no multiple of it."""
    first_K = sketches_TK[0]
    square = float(first_K @ first_K)
    far_K = sketches_TK[int(np.linalg.norm(sketches_TK - first_K, axis=1).argmax())]
    if not (0 < square < math.inf and np.isfinite(far_K).all()):
        return math.nan
    factor = float(first_K @ far_K) / square
    rest = float(np.linalg.norm(far_K - factor * first_K))
    return factor if rest <= tolerance * float(np.linalg.norm(far_K)) else math.nan


def over_axes(placements: Mapping[str, bool], axes: Sequence[str]) -> list[int]:
    """Return a parameter's row of ``over_NA``; ``placements`` states by axis if it is replicated.

    Example:
        >>> over_axes({"tp": False, "cp": True}, ["tp", "cp", "ep"])
        [0, 2, 1]
    """
    words = {True: _PLACED, False: 0, None: _HELD}
    return [words[placements.get(axis)] for axis in axes]


class MeshAxes(Director):
    """The replicas over the axes of one mesh."""

    def __init__(self, run: DirectedRun) -> None:
        super().__init__(run.report)
        self._first_step = run.first_step
        self._parts = Waiting[tuple[int, str, _Line], AxisPart](_MOST_WAITING)
        self._workers: dict[int, int] = {}
        self._verdicts: dict[str, AxisVerdict | TieVerdict] = {}

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
            parts = self._parts.add((step, axis, ranks), part.rank, part, len(ranks))
            if parts is not None:
                self._compare(step, axis, [parts[each] for each in ranks])

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
            first = self._first_step
            verdict = self._verdicts[axis] = (
                AxisVerdict(axis, first) if shared is None else TieVerdict(axis, first, shared)
            )
        for fault, finding in verdict.observe(step, found, self._workers):
            self.publish(finding, fault.count, (tuple(fault.apart), dict(fault.lines)))


class _Fault(PersistentFault):
    """One kind of difference along an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.is_error = False
        self.apart: dict[str, float] = {}  # largest distance, by parameter
        self.lines: dict[_Line, _Line] = {}  # by line: those that differ from most

    def add(self, step: int, one: Replicated, apart: float, odd: _Line) -> None:
        """Add a parameter on one line in a step; steps of several lines come in any order."""
        if step > self.last:
            self.see(step)
        self.first = min(self.first, step)
        self.apart[one.name] = max(apart, self.apart.get(one.name, 0.0))
        self.lines[one.ranks] = odd


class _Verdict:
    """Judges the parameters along one axis, step by step."""

    def __init__(self, axis: str, begun_at: int) -> None:
        self._axis = axis
        self._begun_at = begun_at  # first step of the run

    def _finding(
        self,
        cause: str,
        severity: Severity,
        fault: _Fault,
        workers: Mapping[int, int],
        fields: Mapping[str, object],
        *,
        suffix: str = "",
        everywhere: bool = False,
    ) -> Finding:
        concerned = {rank for line in fault.lines for rank in line}
        ranks = tuple(sorted(worker for rank, worker in workers.items() if rank in concerned))
        apart = max(fault.apart.values())
        numbers = {
            "axis": self._axis,
            "parameters": list(fault.apart)[:MOST_RECORDED],
            "apart": apart if math.isfinite(apart) else None,
            "lines": [list(line) for line in sorted(fault.lines)[:MOST_RECORDED]],
        }
        fields = {
            "axis": self._axis,
            "names": shortened(list(fault.apart), _MOST_NAMED),
            "where": _where(fault.lines),
            **fields,
        }
        evidence = fault.evidence(cause, severity, ranks, fields, numbers)
        name = f"{cause}:{self._axis}{suffix}"
        finding = finding_of(evidence, fault.last, name=name, begun_at=self._begun_at)
        return replace(finding, ranks=()) if everywhere or len(ranks) == len(workers) else finding


class AxisVerdict(_Verdict):
    """Judges what ranks replicate over one axis, step by step.

    A gradient that differs while all parameters agree is partial: as a consequence, its parameters
    drift from then on, and with them every other gradient. If parameters differ first, gradients
    differ as a consequence. The run's first step reads all of them, and shows which came first. In
    later steps, which read some, gradients count as partial if they are as far apart as parts, and
    much farther than their parameters; others count as a consequence.

    If the axis cuts no parameter, the ranks along it may not share one model. A parameter that
    begins with other values there may be intended, and gradients are not judged.
    """

    def __init__(self, axis: str, begun_at: int) -> None:
        super().__init__(axis, begun_at)
        self._partial: _Fault | None = None
        self._differ: _Fault | None = None
        self._met: dict[_Line, set[str]] = defaultdict(set)
        self._held: dict[str, set[_Line]] = defaultdict(set)  # by ranks along the axis
        self._own: set[_Line] = set()  # their models may differ on purpose

    def observe(
        self, step: int, found: Sequence[Replicated], workers: Mapping[int, int]
    ) -> list[tuple[_Fault, Finding]]:
        """Process the replicas on one line in a step; return the faults that it shows.

        Steps of the same ranks come in order, with one parameter at least. ``workers`` are those
        of this run, by rank in the job.
        """
        met = self._met[found[0].ranks]
        begun = [one for one in found if one.name not in met and one.parameter_differs]
        if any(not (one.placed or one.cuts) for one in begun):
            self._own.add(found[0].ranks)
        self._see_gradients(step, found, begins=not met)
        for one in found:
            if one.parameter_differs and self._partial is None:
                self._differ = self._differ or _Fault()
                if one.placed or one.cuts or one.name in met:  # has to be equal along the axis
                    self._differ.is_error = True
                _add_first(self._differ, step, one, one.parameter, 0)
        met |= {one.name for one in found}
        for one in found:
            if one.held:
                self._held[one.name].add(one.ranks)
        return list(self._shown(step, workers))

    def _see_gradients(self, step: int, found: Sequence[Replicated], *, begins: bool) -> None:
        apart = begins and any(one.parameter_differs for one in found)
        if self._differ is not None or apart or found[0].ranks in self._own:
            return
        for one in found:
            part = one.gradient > max(_PART, _MUCH * one.parameter) or begins
            if one.gradient_differs and part:
                self._partial = self._partial or _Fault()
                self._partial.is_error = True
                _add_first(self._partial, step, one, one.gradient, _CYCLE)

    def _shown(self, step: int, workers: Mapping[int, int]) -> Iterator[tuple[_Fault, Finding]]:
        for cause, fault in ((_PARTIAL, self._partial), (_DIFFER, self._differ)):
            if fault is None or fault.last != step:
                continue
            met = {rank for line in self._met for rank in line}
            everywhere = workers.keys() <= met and all(
                self._held[name] <= fault.lines.keys() for name in fault.apart
            )
            apart = max(fault.apart.values())
            by = f"by {apart:.2g} of their norm"
            fields = {"apart": by if math.isfinite(apart) else "since some have none"}
            severity = Severity.ERROR if fault.is_error else Severity.WARNING
            finding = self._finding(cause, severity, fault, workers, fields, everywhere=everywhere)
            yield fault, finding


def _add_first(fault: _Fault, step: int, one: Replicated, apart: float, wait: int) -> None:
    """Add a parameter, unless it is new more than ``wait`` steps later: a consequence."""
    if not fault.count or one.name in fault.apart or step <= fault.first + wait:
        fault.add(step, one, apart, one.odd)


_named = partial(name_ranks, of_job=True)


def _where(lines: Mapping[_Line, _Line]) -> str:
    """Return the ranks of the job that differ, in words: ``ranks 0 and 1, and ranks 2 and 3``.

    If most ranks along an axis agree, those that do not are named: ``rank 3 from ranks 0–2``.
    """
    parts = []
    for line, odd in sorted(lines.items())[:_MOST_LINES]:
        rest = [rank for rank in line if rank not in odd]
        parts.append(_named(odd) + f" from {_named(rest)}" if rest else _named(line))
    if len(lines) > _MOST_LINES:
        parts.append(count(len(lines) - _MOST_LINES, "other group"))
    return ", and ".join(parts)


@dataclass(slots=True)
class _Weight:
    """A weight of several stages on the ranks of one line."""

    begun: int  # digest of its first values
    kept: bool = False  # an update has changed it, and left it equal
    gradients: tuple[float, float] | None = None  # distance and factor of the first that differ
    compared: bool = False  # all ranks had a gradient at some time


class _Drift(_Fault):
    """Weights that have drifted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: tuple[float, float] | None = None  # distance, factor; None if they agreed
        self.compared = False


class TieVerdict(_Verdict):
    """Judges the weights that pipeline stages share, step by step.

    Weights drift apart if their values differ by more than rounding, or if they differ at all after
    their gradients did. It is an error if an update had left them equal before, a warning if they
    only began alike, and a note if one seed or one layer explains that, too. The equal content of
    weights with labels in ``certain`` is no chance.
    """

    def __init__(self, axis: str, begun_at: int, certain: Sequence[str]) -> None:
        super().__init__(axis, begun_at)
        self._certain = frozenset(certain)
        self._weights: dict[tuple[_Line, str], _Weight | None] = {}
        self._drifts: dict[Severity, _Drift] = {}

    def observe(
        self, step: int, found: Sequence[Replicated], workers: Mapping[int, int]
    ) -> list[tuple[_Fault, Finding]]:
        """Process the weights of one line in a step; return the faults that it shows."""
        for one in found:
            key = one.ranks, one.name
            if key not in self._weights:  # else the script has loaded other values since
                self._weights[key] = _Weight(one.digest) if one.same else None
            weight = self._weights[key]
            if weight is not None:
                self._see(step, one, weight)
        return list(self._shown(step, workers))

    def _see(self, step: int, one: Replicated, weight: _Weight) -> None:
        if one.same:
            weight.kept = weight.kept or one.digest != weight.begun
        elif one.parameter_differs or weight.gradients is not None:
            certain = weight.kept or one.name in self._certain
            severity = Severity.WARNING if certain else Severity.NOTE
            drift = self._drifts.setdefault(severity, _Drift())
            drift.add(step, one, one.parameter, one.ranks)
            drift.is_error |= weight.kept  # some had stayed equal over an update
            drift.gradients = drift.gradients or weight.gradients
            drift.compared |= weight.compared
        if math.isfinite(one.gradient):  # else some stage has none, or has cleared it
            weight.compared = True
            if one.gradient_differs and weight.gradients is None:
                weight.gradients = one.gradient, one.factor

    def _shown(self, step: int, workers: Mapping[int, int]) -> Iterator[tuple[_Fault, Finding]]:
        for certain, drift in self._drifts.items():
            if drift.last != step:
                continue
            severity = Severity.ERROR if drift.is_error else certain
            fields = {
                "apart": f"{max(drift.apart.values()):.2g}",
                "why": _why(drift, self._axis),
                "begun": "an update had left them equal" if drift.is_error else "they began alike",
            }
            suffix = "" if severity > Severity.NOTE else ":note"
            yield drift, self._finding(_TIED, severity, drift, workers, fields, suffix=suffix)


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


make_director = MeshAxes
