"""The search for workers that are unlike the others, since when, and until when.

When the common evidence reaches its level, the worker with most of it is blamed and flagged, and
the others are compared without it. Where the workers to blame are not a minority, the finding is
``inconclusive``.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.step import GatheredStep
from rankscope.evidence.outliers.parts import SignalSet
from rankscope.evidence.outliers.words import NAMED_WORKERS, Fault, Traces, describe_fault
from rankscope.stats.arrays import Floats
from rankscope.stats.bets import BetKind
from rankscope.stats.budget import FAR_BELOW, alarm_level
from rankscope.stats.state import State, StateError
from rankscope.stats.units import HEALED, RECENT

_SUSPICIOUS = 0.5
_SAME_ONSET = 15
_SAME_ONSET_PART = 0.25
_SAME_ONSET_ON_HOST = 0.75
_NOTEWORTHY = 3.0
_PART_OF_STRONGEST = 0.6
_SHORTEST_WAIT = 20
_WAIT = 10


class OutlierSearch(Detector):
    """Flags outlier workers, by whole-model and per-group signals.

    ``FAMILY`` is its part of the false-alarm budget, ``SHARE`` the share of each part in the
    evidence, ``KEY`` the prefix of its findings' keys, ``TIE`` the key of a finding without a
    majority.
    """

    FAMILY: ClassVar[float]
    SHARE: ClassVar[float]
    KEY: ClassVar[str]
    TIE: ClassVar[str]

    def __init__(self, num_workers: int, totals: SignalSet, hosts: Sequence[str] = ()) -> None:
        self._num_workers = num_workers
        self._hosts = tuple(hosts)
        self._totals = totals
        self._groups: SignalSet | None = None
        self._faults: list[Fault] = []
        self._steps = 0

    @property
    def flagged(self) -> tuple[int, ...]:
        """Workers that differ from the others at present."""
        return self._totals.test.flagged

    @property
    def steadily_flagged(self) -> tuple[int, ...]:
        """Flagged workers that differ in most steps, by their traces."""
        return tuple(
            worker
            for worker in self.flagged
            if all(trace.kind is not BetKind.RARE for _, trace in self._traces(worker))
        )

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; report the last state of every open fault."""
        return [self._evidence(fault) for fault in self._faults if fault.is_open]

    def state(self) -> State:
        """Return a copy of its state."""
        return {
            "totals": self._totals.state(),
            "faults": [fault.to_plain() for fault in self._faults],
            "steps": self._steps,
        }

    def restore(self, state: State) -> None:
        """Continue from the state of another search; StateError if it does not fit."""
        try:
            self._totals.restore(state["totals"])
            self._faults = [Fault.from_plain(plain) for plain in state["faults"]]
            self._steps = int(state["steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is not the state of a search for outliers: {error}") from error

    def _find(self, gathered: GatheredStep) -> list[FaultEvidence]:
        """Judge a step that was compared; return changed evidence."""
        changed = [*self._judge(gathered), *self._follow(gathered.step)]
        return [self._evidence(fault) for fault in {fault.key: fault for fault in changed}.values()]

    @property
    def _parts(self) -> tuple[SignalSet, ...]:
        return (self._totals,) if self._groups is None else (self._totals, self._groups)

    def _evidence_of_workers(self) -> Floats:
        evidence_W = np.zeros(self._num_workers)
        for part in self._parts:
            evidence_W += self.SHARE * part.test.evidence_of_units()
        return evidence_W

    def _judge(self, gathered: GatheredStep) -> list[Fault]:
        """Blame workers until the rest of the evidence is below the level."""
        changed: list[Fault] = []
        level = alarm_level(self.FAMILY)
        most = sum(self.SHARE * part.test.most_evidence for part in self._parts)
        if most < FAR_BELOW * level:
            return changed
        while (evidence_W := self._evidence_of_workers()).sum() >= level:
            log_W = np.log1p(evidence_W * self._num_workers)
            suspects = np.flatnonzero(log_W >= _SUSPICIOUS * log_W.max()).tolist()
            worker = int(evidence_W.argmax())
            flagged = self._totals.test.flagged
            minority = 2 * (len(suspects) + len(flagged)) < self._num_workers
            in_tie = any(fault.tie and fault.is_open for fault in self._faults)
            if minority and not in_tie and not self._is_one_of_many(worker):
                changed.append(self._blame(worker, gathered))
            else:
                strongest_first = sorted(suspects, key=lambda w: -log_W[w])
                changed += self._report_tie([*strongest_first, *flagged][:NAMED_WORKERS], gathered)
        return changed

    def _is_one_of_many(self, worker: int) -> bool:
        """Return whether others differ just as steadily, so that no majority is alike."""
        traces = self._traces(worker)
        if not traces:
            return False
        signal, strongest = traces[0]
        totals = self._totals
        checks = [(totals, index) for index in range(len(totals.signals))]
        if signal.group and self._groups is not None:
            checks.append((self._groups, strongest.signal))
        return any(
            part.test.minority([worker], index, strongest.age) is None for part, index in checks
        )

    def _blame(self, worker: int, gathered: GatheredStep) -> Fault:
        traces = self._traces(worker)
        first = self._onset(worker, traces, gathered)
        traces = self._traces(worker, gathered.step - first + 1)
        for part in self._parts:
            part.test.flag(worker)
        fault = self._same_fault(worker, traces, first, gathered.step)
        if fault is None:
            since = gathered.step - first + 1
            fault = Fault(f"{self.KEY}-{len(self._faults) + 1}", first_step=first, count=since)
            self._faults.append(fault)
        fault.add(worker, traces, gathered.step)
        return fault

    def _same_fault(self, worker: int, traces: Traces, first: int, now: int) -> Fault | None:
        """Return the open fault with the same onset and signals, or one that healed here before."""
        names = {signal.name for signal, _ in traces}
        for fault in self._faults:
            if fault.tie or not names & fault.names:
                continue
            if not fault.is_open:
                if fault.ranks == [worker]:
                    return fault
                continue
            span = now - min(first, fault.first_step)
            part = _SAME_ONSET_ON_HOST if self._share_host(worker, fault) else _SAME_ONSET_PART
            if abs(fault.first_step - first) <= max(_SAME_ONSET, part * span):
                return fault
        return None

    def _share_host(self, worker: int, fault: Fault) -> bool:
        hosts = self._hosts
        return len(set(hosts)) > 1 and {hosts[rank] for rank in fault.ranks} == {hosts[worker]}

    def _report_tie(self, suspects: list[int], gathered: GatheredStep) -> list[Fault]:
        """Report that workers differ, but not which are at fault.

        ``suspects`` begins with the worker that stands out most.
        """
        traces = {worker: self._traces(worker) for worker in suspects}
        first = self._onset(suspects[0], traces[suspects[0]], gathered)
        absorbed = [fault for fault in self._faults if fault.is_open and not fault.tie]
        for fault in absorbed:
            first = min(first, fault.first_step)
            fault.absorbed = True
            fault.active = []
        for worker in self._totals.test.flagged:
            self._unflag(worker)
        tie = next((fault for fault in self._faults if fault.tie), None)
        if tie is None:
            tie = Fault(key=self.TIE, first_step=first, tie=True)
            self._faults.append(tie)
        tie.wait = max(_SHORTEST_WAIT, _WAIT * (gathered.step - max(tie.last_step, first) + 1))
        tie.count += 1
        for worker, found in traces.items():
            tie.add(worker, found, gathered.step)
        for part in self._parts:
            part.test.start_anew()
        return [*absorbed, tie]

    def _follow(self, step: int) -> list[Fault]:
        """Add a step to open faults, and unflag workers that have healed."""
        changed = []
        for fault in self._faults:
            if not fault.is_open:
                continue
            if fault.tie:
                healed = step - fault.last_step > fault.wait
                active = [] if healed else fault.active
            else:
                active = [
                    w
                    for w in fault.active
                    if any(part.test.certainty(w) > HEALED for part in self._parts)
                ]
                if any(part.test.certainty(w) >= 1 for part in self._parts for w in active):
                    fault.last_step = step
                fault.count += 1
            if active != fault.active:
                for worker in () if fault.tie else sorted(set(fault.active) - set(active)):
                    self._unflag(worker)
                fault.active = active
                changed.append(fault)
            elif fault.count >= 2 * fault.reported_count:
                changed.append(fault)
        return changed

    def _unflag(self, worker: int) -> None:
        for part in self._parts:
            part.test.unflag(worker)

    def _traces(self, worker: int, since: int = RECENT) -> Traces:
        """Return a worker's traces over the last ``since`` steps, the strongest first."""
        least = _NOTEWORTHY
        for part in self._parts:
            strongest = part.test.traces(worker)[:1]
            least = max([least, *(_PART_OF_STRONGEST * trace.log_evidence for trace in strongest)])
        found = [
            (part.signals[trace.signal], trace)
            for part in self._parts
            for trace in part.test.traces(worker, least, since)
        ]
        return sorted(found, key=lambda pair: -pair[1].log_evidence)

    def _onset(self, worker: int, traces: Traces, gathered: GatheredStep) -> int:
        if not traces:
            return gathered.step
        signal, trace = traces[0]
        part = self._groups if signal.group and self._groups is not None else self._totals
        return part.test.onset(worker, trace.signal, trace.kind)

    def _evidence(self, fault: Fault) -> FaultEvidence:
        fault.reported_count = fault.count
        for worker in fault.active[:NAMED_WORKERS]:
            if not fault.tie:
                since = fault.last_step - fault.first_step + 1
                fault.traces[worker] = self._traces(worker, since) or fault.traces[worker]
        num_groups = 0 if self._groups is None else len(self._groups.group_names)
        return describe_fault(fault, self._num_workers, self._hosts, self._steps, num_groups)
