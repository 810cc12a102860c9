"""Compares the ranks' shares of a step along the axes of a mesh: losses, labels, and the norm.

The norm of all gradients is the same in every clipped step, and never in two others. A model that
is cut over another axis than that of the workers has one norm: the root of all squares, where what
ranks along the axis hold alike counts once. Where another combination of the ranks' squares is the
same in many steps and that norm is not, the training clips by the combination.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.detector import FaultEvidence, PersistentFault, finding_of
from rankscope.bus.finding import Severity
from rankscope.bus.probe import DirectedRun, Director
from rankscope.bus.shares import Packable, PackedError, Waiting
from rankscope.bus.words import MOST_RECORDED, count, name_ranks, shortened
from rankscope.stats.arrays import Bools
from rankscope.stats.rounding import tolerance_of

LOSSES = "loss.differs_along_axis"
LABELS = "loss.labels_lost"
NORM = "clip-norm-over-mesh"
SAMPLES = "samples-differ-along-axis"

_MOST_LINES = 3
_MOST_WAITING = 1024  # incomplete steps of ranks along an axis

APART = 3
"""Steps in which ranks along an axis draw other samples, until that is reported."""

CLIPPED = 8
"""Steps with the same combination of norms that prove that it is clipped by."""

_KEPT = 64
_RUN = "run "
_VARIES = 10.0  # over rounding, so that a norm is not the one that is clipped by
_ALIKE = 1e-3  # relative difference of squares that ranks hold alike
_TINY = 1e-12  # nats: below it a loss has no digits to compare


@dataclass(frozen=True, slots=True)
class Squares(Packable):
    """One rank's squares of its gradients' elements, summed, in a step.

    In the sum over its ranks, copies inside a data-parallel group count once.
    """

    run: int  # lowest rank of its data-parallel group in the job
    num_ranks: int
    sums: Mapping[str, float]  # by axes that hold alike, joined by commas
    rounding: float  # relative error of a norm after clipping


@dataclass(frozen=True, slots=True)
class AxesShare(Packable):
    """One rank's share of a step."""

    rank: int
    lines: Mapping[str, tuple[int, ...]]  # ranks of the job along each axis, this one among them
    cut: tuple[str, ...]  # axes over which the model is cut: the ranks compute one loss together
    sequences: tuple[str, ...]  # axes over which each sequence is cut
    losses: tuple[float, ...]  # loss of each micro-batch or sample, per label token
    weight: float | None  # number of label tokens behind them; None if unknown
    samples: int  # digest of the inputs that identify samples
    rows: int
    tokens: float  # number of tokens in them; 0 if unknown
    dtype: str  # coarsest type in which the model computes
    random: int | None  # digest of the states of generators that the forward pass used
    squares: Squares | None = None  # of the gradients that the optimizer gets; None if unknown


def loss_distance(shares_T: Sequence[AxesShare]) -> float:
    """Return by how much the losses along an axis differ, relative to the largest; 0 if they agree.

    The ranks have the same samples, and together count more label tokens than these have: so they
    cannot have divided the labels, and each computes the loss of all of them. A difference up to
    :func:`~rankscope.stats.rounding.tolerance_of` is rounding.
    """
    first = shares_T[0]
    alike = all(
        (one.samples, one.rows, one.weight, len(one.losses))
        == (first.samples, first.rows, first.weight, len(first.losses))
        for one in shares_T
    )
    if not alike or first.weight is None or not first.tokens:
        return 0.0
    if len(shares_T) * first.weight <= first.tokens:
        return 0.0
    apart = 0.0
    for losses_T in zip(*(one.losses for one in shares_T), strict=True):
        largest = max(map(abs, losses_T))
        if math.isfinite(largest) and largest > _TINY:
            apart = max(apart, (max(losses_T) - min(losses_T)) / largest)
    return apart if apart > max(tolerance_of(one.dtype) for one in shares_T) else 0.0


def lost_labels(shares_T: Sequence[AxesShare]) -> tuple[int, int]:
    """Return how many labels of one sequence's parts are never predicted, and how many could be.

    Where every rank counts one label less than it has tokens in each row, labels are shifted inside
    each part. The first token of a part is then predicted by nobody, though the part before it
    could; only that of the sequence itself has nothing before it.
    """
    inside = all(
        one.rows and one.weight == one.tokens - one.rows and one.tokens > one.rows
        for one in shares_T
    )
    parts_differ = len({one.samples for one in shares_T}) == len(shares_T)
    if not inside or not parts_differ or len({one.rows for one in shares_T}) > 1:
        return 0, 0
    rows = shares_T[0].rows
    offered = round(sum(one.tokens for one in shares_T)) - rows
    return rows * (len(shares_T) - 1), offered


_log = logging.getLogger("rankscope")


class Axes(Director):
    """The shares along the axes of one mesh."""

    def __init__(self, run: DirectedRun) -> None:
        super().__init__(run.report)
        self._first_step = run.first_step
        self._shares = Waiting[tuple[int, str, tuple[int, ...]], AxesShare](_MOST_WAITING)
        self._faults: dict[str, PersistentFault] = {}  # by name of their findings
        self._norm = NormOverMesh()
        self._apart: dict[tuple[str, tuple[int, ...]], int] = {}  # first step; -1: not in all

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Process a rank's share of a step."""
        try:
            share = AxesShare.unpack(content)
        except PackedError as error:
            _log.debug("what a rank sent of its mesh cannot be read: %s", error)
            return
        if share.squares is not None:
            wrong = self._norm.take(share.rank, step, share.squares, share.lines)
            if wrong is not None:
                fields = {
                    "norm": f"{wrong.norm:.3g}",
                    "spread": f"{wrong.spread:.2g}",
                    "how": _ALONE if wrong.alone else _TWICE.format(axis=wrong.axis),
                    "steps": count(wrong.steps, "clipped step"),
                }
                numbers = {"axis": wrong.axis, "norm": wrong.norm}
                self._add("sync.clip_norm", wrong.axis, step, fields, numbers, key=NORM)
        for axis, line in share.lines.items():
            shares = self._shares.add((step, axis, line), share.rank, share, len(line))
            if shares is not None:
                self._compare(step, axis, [shares[each] for each in line])

    def _compare(self, step: int, axis: str, shares_T: Sequence[AxesShare]) -> None:
        line = [share.rank for share in shares_T]
        self._compare_samples(step, axis, shares_T)
        if axis in shares_T[0].cut and (apart := loss_distance(shares_T)):
            losses = [f"{loss:.5g}" for share in shares_T for loss in share.losses[:1]]
            drawn = {share.random for share in shares_T}
            fields = {
                "axis": axis,
                "ranks": name_ranks(line, of_job=True),
                "values": " against ".join(dict.fromkeys(losses)),
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
                "ranks": name_ranks(line, of_job=True),
                "kept": f"{offered - lost:,}",
                "offered": f"{offered:,}",
                "each": f"{lost // (len(line) - 1):,}",
            }
            self._add(LABELS, axis, step, fields, {"axis": axis, "lost": lost, "offered": offered})

    def _compare_samples(self, step: int, axis: str, shares_T: Sequence[AxesShare]) -> None:
        """Note that ranks which compute one model together draw other samples in every step."""
        line = tuple(share.rank for share in shares_T)
        first = shares_T[0]
        differ = len({share.samples for share in shares_T}) > 1 and all(
            share.rows == first.rows > 0 for share in shares_T
        )
        if axis not in first.cut or axis in first.sequences:
            return
        begun = self._apart.setdefault((axis, line), step if differ else -1)
        if not differ or begun < 0:  # a batch of some step has been the same
            self._apart[axis, line] = -1
        elif step == begun + APART:
            lines = sorted(each for each, first in self._apart.items() if 0 <= first <= begun)
            named = [name_ranks(ranks, of_job=True) for _, ranks in lines]
            fields = {"axis": axis, "ranks": shortened(named, _MOST_LINES, "other group")}
            numbers = {"axis": axis, "lines": [list(ranks) for _, ranks in lines[:MOST_RECORDED]]}
            evidence = FaultEvidence(
                SAMPLES, Severity.NOTE, (), begun, step, APART, fields, numbers, SAMPLES
            )
            finding = finding_of(evidence, step, name=SAMPLES, begun_at=self._first_step)
            self.publish(finding, facts=lines)

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
        fault = self._faults.setdefault(name, PersistentFault())
        fault.see(step)
        fault.first = min(fault.first, step)  # steps of several lines come in any order
        numbers = {**numbers, "steps": fault.count}
        evidence = fault.evidence(cause, severity, (), fields, numbers, key=key)
        finding = finding_of(evidence, step, name=name, begun_at=self._first_step)
        self.publish(finding, fault.count)


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


@dataclass(frozen=True, slots=True)
class WrongNorm:
    """A norm by which a training clips, and which is not that of all gradients."""

    axis: str  # along which ranks count what all of them hold; empty if ``alone``
    alone: bool  # only the ranks of one data-parallel group count in it
    norm: float
    spread: float  # relative spread of the norm of all gradients after clipping
    steps: int


class NormOverMesh:
    """Follows the norm of all gradients after clipping, and the combinations in its place."""

    def __init__(self) -> None:
        self._steps = Waiting[int, Squares](_KEPT)
        self._norms: deque[dict[str, float]] = deque(maxlen=_KEPT)

    def take(
        self, rank: int, step: int, squares: Squares, lines: Mapping[str, tuple[int, ...]]
    ) -> WrongNorm | None:
        """Process a rank's squares of a step; return what is wrong once all ranks are there."""
        there = self._steps.add(step, rank, squares, squares.num_ranks)
        if there is None:
            return None
        sizes = {axis: len(line) for axis, line in lines.items()}
        norms = _combinations(there, sizes)
        if norms is None:
            return None
        self._norms.append(norms)
        return self._judge(max(each.rounding for each in there.values()))

    def _judge(self, rounding: float) -> WrongNorm | None:
        whole_T = np.array([norms[""] for norms in self._norms])
        runs = [name for name in self._norms[-1] if name.startswith(_RUN)]
        parts_RT = [np.array([norms.get(run, math.nan) for norms in self._norms]) for run in runs]
        clipped_RT = [_where_largest(part_T, rounding) for part_T in parts_RT]
        own_T = np.logical_and.reduce(clipped_RT)
        a_part = max(part_T[-1] for part_T in parts_RT) < whole_T[-1] * (1 - _VARIES * rounding)
        if a_part and own_T.sum() >= CLIPPED:
            norm = float(parts_RT[0].max())
            return WrongNorm("", True, norm, _spread(whole_T[own_T]), int(own_T.sum()))
        for axis in (name for name in self._norms[-1] if name not in ("", *runs)):
            norms_T = np.array([norms[axis] for norms in self._norms])
            clipped_T = _where_largest(norms_T, rounding)
            spread = _spread(whole_T[clipped_T])
            if clipped_T.sum() >= CLIPPED and spread > _VARIES * rounding:
                return WrongNorm(axis, False, float(norms_T.max()), spread, int(clipped_T.sum()))
        return None


def _where_largest(norms_T: NDArray[Any], rounding: float) -> Bools:
    """Return in which steps a norm has its largest value."""
    return np.asarray(norms_T >= norms_T.max() * (1 - 2 * rounding))


def _combinations(
    there: Mapping[int, Squares], sizes: Mapping[str, int]
) -> dict[str, float] | None:
    """Return norms of a step by name; None where they are not known.

    They are the norm of all gradients by an empty name, the norm in which what is alike along an
    axis counts once for each rank by the axis, and that of each data-parallel group by its number.
    """
    totals: dict[str, float] = {}
    runs: dict[int, float] = {}
    for squares in there.values():
        for alike, square in squares.sums.items():
            totals[alike] = totals.get(alike, 0.0) + square
        runs[squares.run] = runs.get(squares.run, 0.0) + sum(squares.sums.values())
    found = {"": 0.0, **dict.fromkeys(sizes, 0.0)}
    for alike, total in totals.items():
        over = alike.split(",") if alike else []
        once = total / math.prod(sizes[axis] for axis in over)
        for name in found:
            found[name] += once * (sizes[name] if name in over else 1)
    found |= {f"{_RUN}{number}": square for number, square in runs.items()}
    if not all(0 < square < math.inf for square in found.values()) or not _are_copies(there):
        return None
    return {name: math.sqrt(square) for name, square in found.items()}


def _are_copies(there: Mapping[int, Squares]) -> bool:
    """Return whether data-parallel groups agree on what all of them should hold alike."""
    alike: dict[str, dict[int, float]] = {}
    for squares in there.values():
        for name, square in squares.sums.items():
            if name:
                by_run = alike.setdefault(name, {})
                by_run[squares.run] = by_run.get(squares.run, 0.0) + square
    return all(_spread(np.array(list(by_run.values()))) <= _ALIKE for by_run in alike.values())


def _spread(values: NDArray[Any]) -> float:
    return float(np.ptp(values) / values.max())


make_director = Axes
