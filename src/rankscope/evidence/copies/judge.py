"""The detector of copies of the model: averages whose share jumps, and copies that never change."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, RestartDetector, RunFacts, evidence_at
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import MISSING_INT
from rankscope.bus.steps import Step
from rankscope.evidence.copies import KEY

JUMPS = "state.average_jumps"
KEPT = "state.copy_never_changes"
ROUNDED = "state.average_rounded"
STALE = "state.average_buffers_rest"

_TIMES = 8  # the share of an average over that before a restart
_REST = 0.25  # of the elements that rounding keeps, in a reading
_RESTS = 3  # such readings
_STALE = 3  # readings in which an average's buffers rested, and the model's did not
_READINGS = 4  # in a row, in which a copy was written and has kept its bits


class CopiesOfModel(RestartDetector):
    """Copies of the model that do not follow it as they should.

    - An average that a restarted job takes up where it is, and whose share (one minus the decay) is
      many times what it was: its warm-up begins anew, and the model overwrites the average.
    - An average of 16 bits, many of whose elements stay where they are while others move: a small
      share of the way is less than half of the distance to the next value.
    - An average in evaluation mode that moves, and whose buffers never do, as the model's do.
    - A module that is written from step to step and keeps its bits, while the model is trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shares: dict[str, float] = {}  # the last one of each average
        self._rests: dict[str, int] = {}  # readings in which rounding kept many elements
        self._stale: dict[str, int] = {}  # readings in which buffers rested
        self._moving: set[str] = set()  # averages whose buffers have changed
        self._awaited: set[str] = set()  # averages that a session has taken up
        self._writes: dict[str, tuple[int, int]] = {}  # at the last reading, with its bits
        self._kept: dict[str, int] = {}  # readings in a row
        self._changed: set[str] = set()
        self._first: dict[str, int] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report copies that do not follow the model."""
        rows = step.gathered.differences
        held = held_values(rows, StateKind.FOLLOWS, KEY) if rows else {}
        number = step.gathered.step
        by_label: dict[str, dict[str, int]] = {}
        for name, values_W in held.items():
            label, _, what = name.rpartition("|")
            known = values_W[values_W != MISSING_INT]
            by_label.setdefault(label, {})[what] = int(known[0])
        begins = bool(by_label) and self._restarts()
        for label, values in by_label.items():
            yield from self._follow_share(label, values, number, begins=begins)
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

    def _follow_rest(
        self, label: str, values: dict[str, int], step: int
    ) -> Iterator[FaultEvidence]:
        rest = float(np.int64(values["rest"]).view(np.float64)) if "rest" in values else math.nan
        if not rest >= _REST:
            return
        key = f"{ROUNDED}:{label}"
        first = self._first.setdefault(key, step - 1)
        count = self._rests[label] = self._rests.get(label, 0) + 1
        if count >= _RESTS:
            fields = {"name": label, "rest": f"{100 * rest:.0f} %"}
            numbers = {"name": label, "rest": rest, "readings": count}
            given = first, step, count, fields, numbers, key
            yield FaultEvidence(ROUNDED, Severity.WARNING, (), *given)

    def _follow_buffers(
        self, label: str, values: dict[str, int], step: int
    ) -> Iterator[FaultEvidence]:
        if "stale" not in values or not _share(values) > 0:
            return
        if not values["stale"]:
            self._moving.add(label)
        if label in self._moving:
            return
        key = f"{STALE}:{label}"
        first = self._first.setdefault(key, step - 1)
        count = self._stale[label] = self._stale.get(label, 0) + 1
        if count >= _STALE:
            numbers = {"name": label, "readings": count}
            given = first, step, count, {"name": label}, numbers, key
            yield FaultEvidence(STALE, Severity.WARNING, (), *given)

    def _follow_writes(
        self, label: str, values: dict[str, int], step: int, *, begins: bool
    ) -> Iterator[FaultEvidence]:
        now = values["writes"], values["bits"]
        before = None if begins else self._writes.get(label)
        self._writes[label] = now
        if before is None or now[1] != before[1]:
            self._changed |= {label} if before is not None else set()
            self._kept[label] = 0
        elif now[0] > before[0]:
            self._first.setdefault(label, step - 1)
            self._kept[label] = self._kept.get(label, 0) + 1
        if self._kept.get(label, 0) >= _READINGS and label not in self._changed:
            fields = {"name": label}
            kept = self._kept[label]
            given = self._first[label], step, kept, fields, {"name": label, "readings": kept}
            yield FaultEvidence(KEPT, Severity.WARNING, (), *given, key=f"{KEPT}:{label}")


def _share(values: dict[str, int]) -> float:
    """Return the share of an average's way in a reading; NaN if it did not move to the model."""
    share = float(np.int64(values["share"]).view(np.float64)) if "share" in values else math.nan
    return share if math.isfinite(share) else math.nan


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (CopiesOfModel(),)
