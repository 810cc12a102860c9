"""Workers that differ from the others: which, since when, in what, and by how much.

Each step compares the workers in loss, gradient norm and direction, in norm and direction of every
group of parameters (:mod:`rankscope.core.exchangeability`), and in how much they are given
(:mod:`rankscope.diagnose.amounts`). When the common evidence reaches
its level, the worker with most of it is blamed and set apart, and the others are compared without
it. Where those who would have to be blamed are not a minority, nothing tells who is right: the
finding is ``inconclusive``.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankscope.core.apart import HEALED
from rankscope.core.arrays import Floats
from rankscope.core.bets import Kind
from rankscope.core.budget import FAR_BELOW, OUTLIERS, alarm_level
from rankscope.core.recent import RECENT
from rankscope.core.state import State, StateError
from rankscope.core.step import GatheredStep
from rankscope.diagnose.amounts import Amounts
from rankscope.diagnose.evidence import Detector, Evidence, Observation
from rankscope.diagnose.gross import GrossOutliers, GrossValues
from rankscope.diagnose.outlier_parts import (
    Part,
    group_signals,
    groups_of,
    log_sizes,
    of_usual_size,
    total_signals,
    totals_of,
)
from rankscope.diagnose.outlier_words import (
    NAMED_WORKERS,
    Fault,
    Traces,
    WorkerSignal,
    describe_fault,
)
from rankscope.diagnose.outlook import Outlook
from rankscope.diagnose.repeats import RecentBatches

_SUSPICIOUS = 0.5
_SAME_ONSET = 15
_SAME_ONSET_PART, _SAME_ONSET_ON_HOST = 0.25, 0.75
_NOTEWORTHY = 3.0
_PART_OF_STRONGEST = 0.6
_SHORTEST_WAIT, _WAIT = 20, 10
_SHARES = 0.45, 0.1, 0.45
"""Of the evidence: totals, amounts, groups."""


class WorkerOutliers(Detector):
    """Finds workers that differ from the others.

    Args:
        num_workers: W.
        hosts: Host of each rank; empty when unknown.
    """

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        self._num_workers = num_workers
        self._hosts = tuple(hosts)
        self._totals = Part(num_workers, total_signals())
        self._amounts = Amounts(num_workers)
        self._groups: Part | None = None
        self._batches = RecentBatches(num_workers)
        signals = self._totals.signals
        self._gross = GrossOutliers([signal.how.label for signal in signals], num_workers)
        self._values = GrossValues(num_workers)
        self._outlook = Outlook(self._totals, self._batches)
        self._faults: list[Fault] = []
        self._left_out: list[int] = []
        self._repeats_W = self._none_W = np.zeros(num_workers, bool)
        self._steps = 0

    def observe(self, step: Observation) -> Iterable[Evidence]:
        """Take one step; speaks of faults that begin, change, grow or heal."""
        if self._num_workers < 2:
            return ()
        self._steps += 1
        if step.index == 0:
            self._outlook.begin(step.stretch)
        if self.set_apart:
            self._outlook.forget()
            self._feed(step)
        elif self._outlook.take(step, self._groups):
            self._left_out, self._repeats_W = [], self._none_W
        else:
            self._feed(step)
        self._amounts.see(step.gathered.workers, ~self._repeats_W, step.gathered.step)
        changed = [*self._judge(step.gathered), *self._follow(step.gathered.step)]
        gross = self._gross.observe(self._z_of_unsuspected(), step.gathered.step)
        return [
            *self._values.observe(step.gathered, self.not_compared),
            *gross,
            *(self._evidence(fault) for fault in {fault.key: fault for fault in changed}.values()),
        ]

    @property
    def set_apart(self) -> tuple[int, ...]:
        """Workers that differ from the others at present."""
        return self._totals.test.set_apart

    @property
    def steadily_apart(self) -> tuple[int, ...]:
        """Those of them that differ in most steps, as far as their traces tell."""
        return tuple(
            worker
            for worker in self.set_apart
            if all(trace.kind is not Kind.RARE for _, trace in self._traces(worker))
        )

    @property
    def not_compared(self) -> tuple[int, ...]:
        """Workers that differ, or could not be compared in the last step."""
        return tuple(sorted({*self.set_apart, *self._left_out}))

    def _z_of_unsuspected(self) -> NDArray[np.float32]:
        z_SW, apart = self._totals.test.z_SU, list(self.set_apart)
        if apart:
            z_SW = z_SW.copy()
            z_SW[:, apart] = 0
        return z_SW

    def close(self) -> Iterable[Evidence]:
        """End the run; tells the last state of every open fault."""
        return [self._evidence(fault) for fault in self._faults if fault.is_open]

    def state(self) -> State:
        """Return a copy of all that it remembers."""
        groups = self._groups
        return {
            "totals": self._totals.state(),
            "amounts": self._amounts.state(),
            "groups": None if groups is None else groups.state(),
            "group_names": [] if groups is None else groups.group_names,
            "batches": self._batches.state(),
            "gross": self._gross.state(),
            "values": self._values.state(),
            "faults": [fault.to_plain() for fault in self._faults],
            "steps": self._steps,
        }

    def restore(self, state: State) -> None:
        """Remember what a detector of as many workers remembered.

        Raises:
            StateError: The state does not fit.
        """
        try:
            if state["groups"] is not None:
                names = state["group_names"]
                self._groups = Part(self._num_workers, group_signals(names))
                self._groups.restore(state["groups"])
            self._totals.restore(state["totals"])
            self._amounts.restore(state["amounts"])
            self._batches.restore(state["batches"])
            self._gross.restore(state["gross"])
            self._values.restore(state["values"])
            self._faults = [Fault.from_plain(plain) for plain in state["faults"]]
            self._steps = int(state["steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is not the state of a search for outliers: {error}") from error

    def _feed(self, step: Observation) -> None:
        gathered, report = step.gathered, step.report
        # Who knows a batch by heart, or has one of another size (at the end of an epoch), is
        # unlike the others for no fault.
        self._repeats_W = self._none_W
        if not self._outlook.no_repeats:
            self._repeats_W = self._batches.observe(gathered.workers["batch_digest"])
        usable_W = of_usual_size(gathered.workers["num_samples"]) & ~self._repeats_W
        for group in step.identical:  # one of them speaks for all
            usable_W[list(group[1:])] = False
        self._left_out = (~usable_W).nonzero()[0].tolist()
        copies, unknown_W = bool(step.identical), np.full(self._num_workers, np.nan)
        values = totals_of(report, self._totals.signals, copies=copies)
        totals_SW = np.array([unknown_W if one is None else one for one in values])
        sizes_W = log_sizes(gathered.workers["loss_weight"])
        self._totals.observe(totals_SW, usable_W, sizes_W, gathered.step)
        groups_RW = groups_of(report, copies=copies)
        if groups_RW is None:
            return
        if self._groups is None or self._groups.group_names != list(gathered.groups):
            self._groups = Part(self._num_workers, group_signals(gathered.groups))
            for worker in self.set_apart:
                self._groups.test.set_unit_apart(worker)
        self._groups.observe(groups_RW, usable_W, sizes_W, gathered.step)

    @property
    def _parts(self) -> tuple[Part, ...]:
        own = self._totals, self._amounts
        return own if self._groups is None else (*own, self._groups)

    def _evidence_of_workers(self) -> Floats:
        evidence_W = np.zeros(self._num_workers)
        for share, part in zip(_SHARES, self._parts, strict=False):
            evidence_W += share * part.test.evidence_of_units()
        return evidence_W

    def _judge(self, gathered: GatheredStep) -> list[Fault]:
        """Blame workers until what is left of the evidence is below the level."""
        changed: list[Fault] = []
        level = alarm_level(OUTLIERS)
        shares = zip(_SHARES, self._parts, strict=False)
        if sum(share * part.test.most_evidence for share, part in shares) < FAR_BELOW * level:
            return changed
        while (evidence_W := self._evidence_of_workers()).sum() >= level:
            log_W = np.log1p(evidence_W * self._num_workers)
            suspects = np.flatnonzero(log_W >= _SUSPICIOUS * log_W.max()).tolist()
            worker, apart = int(evidence_W.argmax()), self._totals.test.set_apart
            minority = 2 * (len(suspects) + len(apart)) < self._num_workers
            in_tie = any(fault.tie and fault.is_open for fault in self._faults)
            if minority and not in_tie and not self._is_one_of_many(worker):
                changed.append(self._blame(worker, gathered))
            else:
                strongest_first = sorted(suspects, key=lambda w: -log_W[w])
                changed += self._say_tie([*strongest_first, *apart][:NAMED_WORKERS], gathered)
        return changed

    def _is_one_of_many(self, worker: int) -> bool:
        """Return whether others differ just as steadily, so that no majority is alike."""
        traces = self._traces(worker)
        if not traces:
            return False
        (signal, strongest), totals = traces[0], self._totals
        checks: list[tuple[Part, int]] = [(totals, index) for index in range(len(totals.signals))]
        part = self._part_of(signal)
        if part is not totals:
            checks.append((part, strongest.signal))
        return any(
            part.test.odd_ones_out([worker], index, strongest.age) is None for part, index in checks
        )

    def _blame(self, worker: int, gathered: GatheredStep) -> Fault:
        traces = self._traces(worker)
        first = self._onset(worker, traces, gathered)
        traces = self._traces(worker, gathered.step - first + 1)
        for part in self._parts:
            part.test.set_unit_apart(worker)
        fault = self._same_fault(worker, traces, first, gathered.step)
        if fault is None:
            since = gathered.step - first + 1
            fault = Fault(f"outlier-{len(self._faults) + 1}", first_step=first, count=since)
            self._faults.append(fault)
        fault.add(worker, traces, gathered.step)
        return fault

    def _same_fault(self, worker: int, traces: Traces, first: int, now: int) -> Fault | None:
        """Return the open fault that began with this one and shows alike, or healed here before."""
        names = {signal.name for signal, _ in traces}
        for fault in self._faults:
            if fault.tie or not names & {name for name, _ in fault.ways}:
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

    def _say_tie(self, suspects: list[int], gathered: GatheredStep) -> list[Fault]:
        """Say that workers differ while nothing tells which of them are at fault.

        Args:
            suspects: Those who stand out most, the first one most of all.
            gathered: The step.
        """
        traces = {worker: self._traces(worker) for worker in suspects}
        first = self._onset(suspects[0], traces[suspects[0]], gathered)
        absorbed = [fault for fault in self._faults if fault.is_open and not fault.tie]
        for fault in absorbed:
            first = min(first, fault.first_step)
            fault.absorbed, fault.active = True, []
        for worker in self._totals.test.set_apart:
            self._take_back(worker)
        tie = next((fault for fault in self._faults if fault.tie), None)
        if tie is None:
            tie = Fault(key="workers-differ", first_step=first, tie=True)
            self._faults.append(tie)
        tie.wait = max(_SHORTEST_WAIT, _WAIT * (gathered.step - max(tie.last_step, first) + 1))
        tie.count += 1
        for worker, found in traces.items():
            tie.add(worker, found, gathered.step)
        for part in self._parts:
            part.test.start_anew()
        return [*absorbed, tie]

    def _follow(self, step: int) -> list[Fault]:
        """Count on, and let workers that are like the others again count among them."""
        changed = []
        for fault in self._faults:
            if not fault.is_open:
                continue
            if fault.tie:
                healed = step - fault.last_step > fault.wait
                active = [] if healed else fault.active
            else:
                active = [worker for worker in fault.active if not self._has_healed(worker)]
                fault.last_step = step if self._shows(active) else fault.last_step
                fault.count += 1
            if active != fault.active:
                for worker in () if fault.tie else sorted(set(fault.active) - set(active)):
                    self._take_back(worker)
                fault.active = active
                changed.append(fault)
            elif fault.count >= 2 * fault.told:
                changed.append(fault)
        return changed

    def _shows(self, workers: Sequence[int]) -> bool:
        return any(part.test.certainty(w) >= 1 for part in self._parts for w in workers)

    def _has_healed(self, worker: int) -> bool:
        return all(part.test.certainty(worker) <= HEALED for part in self._parts)

    def _take_back(self, worker: int) -> None:
        for part in self._parts:
            part.test.take_back(worker)

    def _traces(self, worker: int, since: int = RECENT) -> Traces:
        """Return how a worker differs in the last ``since`` steps, the strongest trace first."""
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
        return self._part_of(signal).test.onset(worker, trace.signal, trace.kind)

    def _part_of(self, signal: WorkerSignal) -> Part:
        if signal.how.amount:
            return self._amounts
        return self._groups if signal.group and self._groups is not None else self._totals

    def _evidence(self, fault: Fault) -> Evidence:
        fault.told = fault.count
        for worker in fault.active[:NAMED_WORKERS]:
            if not fault.tie:
                since = fault.last_step - fault.first_step + 1
                fault.traces[worker] = self._traces(worker, since) or fault.traces[worker]
        num_groups = 0 if self._groups is None else len(self._groups.group_names)
        return describe_fault(fault, self._num_workers, self._hosts, self._steps, num_groups)
