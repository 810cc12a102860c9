"""The detector of copies of the model: averages whose share jumps, and copies that never change."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rankscope.bus.detector import (
    Detector,
    FaultEvidence,
    PersistentFault,
    RestartDetector,
    RunFacts,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind, minority_ranks, name_values
from rankscope.bus.steps import Step
from rankscope.evidence.copies import AGAIN, KEY
from rankscope.stats.arrays import MISSING_INT, Floats, Ints

BEGINS = "state.average_begins_anew"
DIFFERS = "state.average_differs"
JUMPS = "state.average_jumps"
KEPT = "state.copy_never_changes"
RESTS = "state.average_rests"
ROUNDED = "state.average_rounded"
STALE = "state.average_buffers_rest"

_TIMES = 8  # the share of an average over that before a restart
_REST = 0.25  # of the elements that rounding keeps, in a reading
_READINGS = {
    ROUNDED: 3,
    STALE: 3,  # an average's buffers rested, and the model's did not
    KEPT: 4,  # in a row: a copy was written, and has kept its bits
    RESTS: 4,  # its model moved
}
"""Readings that show a fault before it is reported."""

_DIFFERS = 2  # readings in which averages of one model differ
_APART = 1.5  # factor between shares of averages of other parts of the model
_FOLLOWS = 0.5  # the largest share of an average that is no plain copy
_AVERAGE = re.compile(r"(?i)(?<![a-z])ema|_ema|EMA|averag|shadow|polyak|swa(?![a-z])")


class CopiesOfModel(RestartDetector):
    """Copies of the model that do not follow it as they should.

    - An average that a restarted job takes up where it is, and whose share (one minus the decay) is
      many times what it was: its warm-up begins anew, and the model overwrites the average.
    - An average of 16 bits, many of whose elements stay where they are while others move: a small
      share of the way is less than half of the distance to the next value.
    - An average in evaluation mode that moves, and whose buffers never do, as the model's do.
    - A module that is written from step to step and keeps its bits, while the model is trained.
    - Averages that move on several workers, and differ though the model is the same on these.
    - An average that was behind the model, and is the model's value after a restart.
    - Tensors that are named as an average and never move, where no average moves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shares: dict[str, float] = {}  # the last one of each average
        self._faults: dict[str, PersistentFault] = {}  # by key of their findings
        self._moving: set[str] = set()  # averages whose buffers have changed
        self._awaited: set[str] = set()  # averages that a session has taken up
        self._writes: dict[str, tuple[int, int]] = {}  # at the last reading, with its bits
        self._changed: set[str] = set()
        self._behind: dict[str, int] = {}  # averages, and where they were last seen behind
        self._unseen: set[str] = set()  # of these, since a restart
        self._resting: dict[str, tuple[int, int]] = {}  # its bits and the model's, of one so named
        self._differing: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report copies that do not follow the model."""
        rows = step.gathered.differences
        held = held_values(rows, StateKind.FOLLOWS, KEY) if rows else {}
        number = step.gathered.step
        of_all: dict[str, dict[str, Ints]] = {}
        for name, values_W in held.items():
            label, _, what = name.rpartition("|")
            of_all.setdefault(label, {})[what] = values_W
        begins = bool(of_all) and self._restarts()
        self._unseen = set(self._behind) if begins else self._unseen
        for label, all_values in of_all.items():
            values = {what: int(v[v != MISSING_INT][0]) for what, v in all_values.items()}
            yield from self._follow_start(label, values, number)
            yield from self._follow_share(label, values, number, begins=begins)
            if f"{label.partition(AGAIN)[0]}{AGAIN}2" not in of_all:  # else in any order
                yield from self._compare(label, all_values, number)
            yield from self._follow_named(label, values, number)
            yield from self._follow_rest(label, values, number)
            yield from self._follow_buffers(label, values, number)
            yield from self._follow_writes(label, values, number, begins=begins)

    def _follow_share(
        self, label: str, values: dict[str, int], step: int, *, begins: bool
    ) -> Iterator[FaultEvidence]:
        if begins and values.get("equal") == 0 and label in self._shares:
            self._awaited.add(label)
        share = _share(values)
        if not share > 0:
            return
        before = self._shares.get(label, math.nan)
        self._shares[label] = share
        if label in self._awaited:
            self._awaited.discard(label)
            if share > _TIMES * before:
                fields = {"name": label, "share": f"{share:.3g}", "before": f"{before:.3g}"}
                numbers = {"name": label, "share": share, "before": before}
                key = f"{JUMPS}:{label}"
                yield evidence_at(step - 1, JUMPS, Severity.WARNING, (), fields, numbers, key=key)

    def _follow_start(
        self, label: str, values: dict[str, int], step: int
    ) -> Iterator[FaultEvidence]:
        if label in self._unseen and values.get("equal") == 1:
            fields = {"name": label, "before": f"{self._shares[label]:.3g}"}
            numbers = {"name": label, "before": self._shares[label], "behind": self._behind[label]}
            key = f"{BEGINS}:{label}"
            yield evidence_at(step, BEGINS, Severity.WARNING, (), fields, numbers, key=key)
            del self._behind[label]
        self._unseen.discard(label)
        if values.get("equal") == 0 and 0 < _share(values) < _FOLLOWS:
            self._behind[label] = step
        elif values.get("equal") == 1:
            self._behind.pop(label, None)

    def _compare(self, label: str, of_all: dict[str, Ints], step: int) -> Iterator[FaultEvidence]:
        if not of_all.keys() >= {"share", "model"}:
            return
        shares_W = of_all["share"].view(np.float64)
        moving = np.flatnonzero((of_all["share"] != MISSING_INT) & (shares_W > 0) & (shares_W < 1))
        alike = len(set(of_all["model"][moving].tolist())) == 1
        values_M = of_all["bits"][moving] if alike else _classes(shares_W[moving])
        ranks = {int(moving[index]) for index in minority_ranks(values_M.tolist())}
        fault = self._differing.setdefault(label, PersistentFault(_DIFFERS))
        if fault.observe(step - 1, ranks):
            found = {rank: f"{shares_W[rank]:.3g}" for rank in moving.tolist()}
            words = name_values([found.get(rank) for rank in range(len(shares_W))])
            numbers = {"name": label, "shares": found, "readings": fault.count}
            fields = {"name": label, "shares": words}
            key = f"{DIFFERS}:{label}"
            yield fault.evidence(DIFFERS, Severity.WARNING, fault.ranks, fields, numbers, key=key)

    def _follow_named(
        self, label: str, values: dict[str, int], step: int
    ) -> Iterator[FaultEvidence]:
        if "writes" in values or "model" not in values or not _AVERAGE.search(label):
            return
        now = values["bits"], values["model"]
        before = self._resting.get(label)
        self._resting[label] = now
        if before is None or label in self._changed:
            return
        if now[0] != before[0]:
            self._changed.add(label)
        elif now[1] != before[1]:
            found = self._seen(RESTS, label, step, Severity.NOTE)
            if not self._shares:  # else what was loaded into one that moves
                yield from found

    def _follow_rest(
        self, label: str, values: dict[str, int], step: int
    ) -> Iterator[FaultEvidence]:
        rest = float(np.int64(values["rest"]).view(np.float64)) if "rest" in values else math.nan
        if not rest >= _REST:
            return
        words = {"rest": f"{100 * rest:.0f} %"}
        yield from self._seen(ROUNDED, label, step, fields=words, numbers={"rest": rest})

    def _follow_buffers(
        self, label: str, values: dict[str, int], step: int
    ) -> Iterator[FaultEvidence]:
        if "stale" not in values or not _share(values) > 0:
            return
        if not values["stale"]:
            self._moving.add(label)
        if label not in self._moving:
            yield from self._seen(STALE, label, step)

    def _follow_writes(
        self, label: str, values: dict[str, int], step: int, *, begins: bool
    ) -> Iterator[FaultEvidence]:
        if "writes" not in values:
            return
        now = values["writes"], values["bits"]
        before = None if begins else self._writes.get(label)
        self._writes[label] = now
        if before is None or now[1] != before[1]:
            self._changed |= {label} if before is not None else set()
            key = f"{KEPT}:{label}"
            if key in self._faults:
                self._faults[key].count = 0
        elif now[0] > before[0] and label not in self._changed:
            yield from self._seen(KEPT, label, step)

    def _seen(
        self,
        cause: str,
        label: str,
        step: int,
        severity: Severity = Severity.WARNING,
        *,
        fields: Mapping[str, object] | None = None,
        numbers: Mapping[str, object] | None = None,
    ) -> list[FaultEvidence]:
        """Add a reading that shows a fault since the one before; return its evidence, if enough."""
        key = f"{cause}:{label}"
        fault = self._faults.setdefault(key, PersistentFault())
        fault.see(step, first=step - 1 if fault.first < 0 else fault.first)
        if fault.count < _READINGS[cause]:
            return []
        name = {"name": label}
        readings = {**name, **(numbers or {}), "readings": fault.count}
        return [fault.evidence(cause, severity, (), {**name, **(fields or {})}, readings, key=key)]


def _share(values: dict[str, int]) -> float:
    """Return the share of an average's way in a reading; NaN if it did not move to the model."""
    share = float(np.int64(values["share"]).view(np.float64)) if "share" in values else math.nan
    return share if math.isfinite(share) else math.nan


def _classes(shares_M: Floats) -> Floats:
    """Return a number for each share; those near the median have the same.

    Example:
        >>> _classes(np.array([0.1, 0.104, 0.1, 0.5]))
        array([0., 0., 0., 4.])
    """
    if not len(shares_M):
        return shares_M
    classes_M: Floats = np.rint(np.log(shares_M / np.median(shares_M)) / math.log(_APART)) + 0.0
    return classes_M


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (CopiesOfModel(),)
