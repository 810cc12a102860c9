"""The search for workers that are unlike the others, since when, and until when.

When the common evidence reaches its level, the worker with most of it is blamed and flagged, and
the others are compared without it. Where the workers to blame are not a minority, the finding is
``inconclusive``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.evidence import Compares
from rankscope.bus.finding import Severity
from rankscope.bus.step import GatheredStep
from rankscope.bus.words import count, name_ranks
from rankscope.evidence.outliers.parts import SignalSet, WorkerSignal
from rankscope.stats.arrays import Floats
from rankscope.stats.bets import FAR_BELOW, BetKind, alarm_level, bound_in_words, false_alarm_bound
from rankscope.stats.exchangeability import SignalTrace
from rankscope.stats.state import Stateful
from rankscope.stats.units import HEALED, RECENT

NAMED_WORKERS = 16
"""Workers whose differences a finding lists one by one."""

_NAMED_GROUPS = 5
_SWAP = (
    " Then run one of them on another worker: what follows the batch is data, what stays with the "
    "worker is its code, parameters or hardware."
)
_LOOK_AT_BOTH = "Compare the batches of both: labels, masks, padding, tokenizer, files"
_ALL = 1 - 1e-6  # deviation of two workers from their middle where one of them has nothing
_AGREED = (
    " It is the data, or what the loop does with the loss: in the canary of step {step} all "
    "workers computed the same from them."
)


Traces = Sequence[tuple[WorkerSignal, SignalTrace]]


@dataclass(slots=True)
class Fault(Stateful):
    """One fault: workers that came to differ at the same time in the same way."""

    key: str  # names it inside the run
    first_step: int
    tie: bool = False  # whether it is unknown which workers are at fault
    ranks: list[int] = field(default_factory=list)  # all workers that it has concerned, ascending
    active: list[int] = field(default_factory=list)
    # how each worker differs, the strongest trace first
    traces: dict[int, Traces] = field(default_factory=dict)
    last_step: int = -1  # the last step that showed it
    count: int = 0  # steps since it began, while it was open
    reported_count: int = 0  # ``count`` at its last report
    wait: int = 0  # for a tie, steps that it took to find: it is not over in fewer
    absorbed: bool = False  # whether a tie has taken its place
    # step of the last canary in which all workers agreed on this one's batch; -1 without
    agreed: int = -1

    @property
    def is_open(self) -> bool:
        """Whether any worker still differs."""
        return bool(self.active)

    @property
    def names(self) -> set[str]:
        """The signals that differ."""
        return {signal.name for traces in self.traces.values() for signal, _ in traces}

    def add(self, worker: int, traces: Traces, step: int) -> None:
        """Add a worker to the fault, for the first time or again."""
        self.ranks = sorted({*self.ranks, worker})
        self.active = sorted({*self.active, worker})
        self.traces[worker] = traces
        self.last_step = step


MEANT = (
    "Nothing, if the workers' data are meant to differ in kind; otherwise shuffle before sharding"
)
"""What to check where workers may differ on purpose."""

_CHECK = {
    ("compute.worker_outlier", Severity.WARNING): (
        "Compare parameters, precision and library versions of {ranks} with another worker's, and "
        "run the same batch on both: a gradient that still differs is made by the worker's state "
        "or its hardware"
    ),
    ("inconclusive", Severity.WARNING): (
        "Run the same batch on both: if they agree, their data or the settings of their losses "
        "differ; if not, compare parameters and hardware"
    ),
    ("inconclusive", Severity.NOTE): MEANT,
}
_RANK_0 = (
    ". Rank 0 alone may be the one that is right: look for a branch or an offset by rank that the "
    "others lack"
)
_FACTOR = (
    " Both have nearly the same factor, as where the loss is multiplied there and not elsewhere."
)
_LOSS_CODE = (
    "Compare the code that computes the loss on {ranks} with another worker's: factors, weights, "
    "what it is divided by."
)
_LASTING = (BetKind.UP, BetKind.DOWN)
_SMALL = 0.25
_LEAST_FACTOR = 1.4
_NEARLY_SAME = 1.15
_MANY = (
    " Too many differ to name one. Shards of different kinds (domains, languages, lengths) look "
    "like this."
)


def describe_fault(
    fault: Fault, num_workers: int, hosts: Sequence[str], num_steps: int, num_groups: int
) -> FaultEvidence:
    """Return a fault as evidence, after ``num_steps`` compared steps."""
    groups = _groups(fault, num_groups)
    one = len(fault.ranks) == 1
    cause = _cause(fault)
    # a tie among many is more likely meant (domains) than a fault
    harmless = fault.absorbed or (fault.tie and num_workers > 3)
    severity = Severity.NOTE if harmless else Severity.WARNING
    factor = _FACTOR if _has_common_factor(fault, num_workers) else ""
    check = _CHECK.get((cause, severity), "") if fault.agreed < 0 else _LOOK_AT_BOTH
    rank_0 = _RANK_0 if cause == "compute.worker_outlier" and fault.ranks == [0] else ""
    differ, stand = ("differs", "stands") if one else ("differ", "stand")
    words = {
        "differ": differ if fault.is_open else "differed",
        "all_differ": "differ" if fault.is_open else "differed",
        "stand": stand if fault.is_open else "stood",
        "what": _what(fault, num_workers),
        "where": _where(groups, fault),
        "host": _host(fault.ranks, hosts),
        "factor": factor,
        "loss_code": f"{_LOSS_CODE.format(ranks=name_ranks(fault.ranks))} " if factor else "",
        "canary": "" if fault.agreed < 0 else _AGREED.format(step=f"{fault.agreed:,}"),
        "swap": _SWAP if fault.agreed < 0 else "",
        "tokens": "",
        "steps": count(num_steps, "step"),
        "bound": bound_in_words(num_steps),
        "workers": num_workers,
        "many": _MANY,
        "zeros": "",
        "check": check.format(ranks=name_ranks(fault.ranks)) + rank_0,
    }
    numbers = {
        "steps_compared": num_steps,
        "false_alarm_probability": false_alarm_bound(num_steps),
        "workers": {str(w): _numbers(fault.traces[w]) for w in fault.ranks[:NAMED_WORKERS]},
    }
    return FaultEvidence(
        cause=cause,
        severity=severity,
        ranks=tuple(fault.ranks),
        first_step=fault.first_step,
        last_step=fault.last_step,
        count=max(1, fault.count),
        fields=words,
        numbers=numbers,
        key=fault.key,
        groups=groups,
        status="open" if fault.is_open else "closed",
    )


def _cause(fault: Fault) -> str:
    if fault.tie:
        return "inconclusive"
    signals = [signal for traces in fault.traces.values() for signal, _ in traces]
    by_data = any(signal.name == "loss" or signal.how.by is Compares.AMOUNTS for signal in signals)
    return "data.worker_outlier" if by_data or fault.agreed >= 0 else "compute.worker_outlier"


def are_small(traces: Traces) -> bool:
    """Return whether no loss and no norm is a quarter off the others', whole ones if any differ."""
    lasting = [(signal, trace) for signal, trace in traces if trace.kind in _LASTING]
    of_totals = [pair for pair in lasting if not pair[0].group]
    sizes = [trace for signal, trace in of_totals or lasting if signal.how.relative]
    return all(one.relative and abs(one.deviation) < _SMALL for one in sizes)


def _has_common_factor(fault: Fault, num_workers: int) -> bool:
    """Return whether each worker's loss and gradient norm differ by the same large factor."""
    factors = [_factors_of_totals(traces, num_workers) for traces in fault.traces.values()]
    return bool(factors) and all(
        min(max(one, 1 / one) for one in (loss, norm)) >= _LEAST_FACTOR
        and max(loss / norm, norm / loss) <= _NEARLY_SAME
        for loss, norm in factors
    )


def _factors_of_totals(traces: Traces, num_workers: int) -> tuple[float, float]:
    """Return by which factors loss and gradient norm differ; 1 where they do not."""
    factors = {"loss": 1.0, "grad_norm": 1.0}
    for signal, trace in traces:
        steady = trace.kind in (BetKind.UP, BetKind.DOWN) and trace.relative
        if signal.name in factors and not signal.group and steady and abs(trace.deviation) < 1e6:
            own = 1 + trace.deviation
            others = 1 - trace.deviation
            factor = own / others if num_workers == 2 and others > 0 else own
            factors[signal.name] = max(factor, 1e-6)
    return factors["loss"], factors["grad_norm"]


def _what(fault: Fault, num_workers: int) -> str:
    """Return the strongest statement for each signal: ``loss +13 %, direction −0.18``."""
    pair = num_workers == 2
    found: dict[str, str] = {}
    strength = {
        worker: max((trace.log_evidence for _, trace in fault.traces[worker]), default=0.0)
        for worker in fault.active or fault.ranks
    }
    for worker in sorted(strength, key=lambda w: -strength[w]):
        traces = fault.traces[worker]
        of_totals = [pair for pair in traces if not pair[0].group]
        for signal, trace in of_totals or traces[:1]:
            size = _apart(signal, trace) if pair else _size(signal, trace)
            whose = f" ({name_ranks([worker])})" if fault.tie and not pair else ""
            found.setdefault(signal.name, _phrase(signal, trace, size) + whose)
    return ", ".join(found.values()) or "too little by now to tell"


def _phrase(signal: WorkerSignal, trace: SignalTrace, size: str) -> str:
    label = f"{signal.how.label} of {signal.group}" if signal.group else signal.how.label
    if trace.kind is BetKind.SPREAD:
        return f"{label} now high, now low (up to {size})"
    if trace.kind is BetKind.RARE:
        return f"in some steps a {label} far from theirs (up to {size})"
    return f"{label} {size}"


def _apart(signal: WorkerSignal, trace: SignalTrace) -> str:
    """Return the difference of two workers; each deviates from the middle between them."""
    deviation = abs(trace.deviation)
    if signal.how.relative and trace.relative and deviation < _ALL:
        return f"by a factor of {(1 + deviation) / (1 - deviation):.2f}"
    if signal.how.relative and trace.relative and deviation <= 1:
        return "about zero on one of them"
    return "different" if deviation != deviation else f"by {2 * deviation:.2g}"


def _size(signal: WorkerSignal, trace: SignalTrace) -> str:
    deviation = trace.deviation
    if deviation != deviation:
        return "different"
    if not signal.how.relative:
        return f"{deviation:+.2f}".replace("-", "−")
    if not trace.relative:  # for values around zero, parts of their median mean nothing
        return f"{deviation:+.2g}".replace("-", "−")
    return f"× {1 + deviation:.{2 if abs(deviation) >= 0.1 else 3}f}"


def _groups(fault: Fault, num_groups: int) -> tuple[str, ...]:
    """Return the groups that stand out in the workers, unless that is true of half of them."""
    strongest: Counter[str] = Counter()
    for traces in fault.traces.values():
        for signal, trace in traces:
            if signal.group:
                strongest[signal.group] = max(strongest[signal.group], round(trace.log_evidence))
    if 2 * len(strongest) > num_groups:
        return ()
    return tuple(name for name, _ in strongest.most_common(_NAMED_GROUPS))


def _where(groups: Sequence[str], fault: Fault) -> str:
    """Return the groups that stand out, unless the statement itself names one."""
    in_total = any(not signal.group for traces in fault.traces.values() for signal, _ in traces)
    return f"; most in {', '.join(groups)}" if groups and (in_total or len(groups) > 1) else ""


def _host(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return a sentence when the workers are those of one host among several."""
    mine = {hosts[rank] for rank in ranks} if len(set(hosts)) > 1 and len(ranks) > 1 else set()
    if len(mine) != 1:
        return ""
    (host,) = mine
    everyone = "all" if len(ranks) == list(hosts).count(host) else "some"
    return f" They are {everyone} of the workers on host {host}."


def _numbers(traces: Traces) -> list[dict[str, Any]]:
    return [
        {
            "signal": signal.name,
            **({"group": signal.group} if signal.group else {}),
            "how": trace.kind.value,
            "deviation": trace.deviation if trace.deviation == trace.deviation else None,
            **({} if trace.relative or not signal.how.relative else {"unit": "absolute"}),
            "log10_evidence": round(trace.log_evidence / 2.302585092994046, 1),
        }
        for signal, trace in list(traces)[:8]
    ]


_SUSPICIOUS = 0.5
_SAME_ONSET = 15
_SAME_ONSET_PART = 0.25
_SAME_ONSET_ON_HOST = 0.75
_NOTEWORTHY = 3.0
_PART_OF_STRONGEST = 0.6
_FADING = 0.5


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

    SETTINGS: ClassVar[tuple[str, ...]] = ("_num_workers", "_hosts")

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
            suspects = self._without_bystanders(suspects, worker)
            flagged = self._totals.test.flagged
            minority = 2 * (len(suspects) + len(flagged)) < self._num_workers
            in_tie = any(fault.tie and fault.is_open for fault in self._faults)
            if minority and not in_tie and not self._is_one_of_many(worker):
                changed.append(self._blame(worker, gathered))
            else:
                strongest_first = sorted(suspects, key=lambda w: -log_W[w])
                changed += self._report_tie([*strongest_first, *flagged][:NAMED_WORKERS], gathered)
        return changed

    def _without_bystanders(self, suspects: list[int], worker: int) -> list[int]:
        """Return the workers that may be at fault as well as this one, which differs most."""
        return suspects

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
        """Report that workers differ, not which is at fault; the first suspect stands out most."""
        traces = {worker: self._traces(worker) for worker in suspects}
        first = self._onset(suspects[0], traces[suspects[0]], gathered)
        absorbed = [fault for fault in self._faults if fault.is_open and not fault.tie]
        for fault in absorbed:
            first = min(first, fault.first_step)
            fault.absorbed = True
            fault.active = []
        for worker in self._totals.test.flagged:
            self._release(worker)
        tie = next((fault for fault in self._faults if fault.tie), None)
        if tie is None:
            since = gathered.step - first + 1
            tie = Fault(key=self.TIE, first_step=first, tie=True, count=since)
            self._faults.append(tie)
        if not tie.is_open:
            tie.wait = gathered.step - max(tie.last_step, first)
        for worker, found in traces.items():
            tie.add(worker, found, gathered.step)
        for part in self._parts:
            for worker in suspects:
                part.test.follow(worker)
            part.test.start_anew()
        return [*absorbed, tie]

    def _follow(self, step: int) -> list[Fault]:
        """Add a step to open faults, and release workers that have healed."""
        changed = []
        for fault in self._faults:
            if not fault.is_open:
                continue
            active = [w for w in fault.active if self._certainty(w) > HEALED]
            if fault.tie and step - fault.last_step <= fault.wait:
                active = fault.active
            if any(self._certainty(w) >= 1 for w in active):
                fault.last_step = step
            fault.count += 1
            if active != fault.active:
                self._measure(fault)
                for worker in sorted(set(fault.active) - set(active)):
                    self._release(worker)
                fault.active = active
                changed.append(fault)
            elif fault.count >= 2 * fault.reported_count:
                changed.append(fault)
        return changed

    def _certainty(self, worker: int) -> float:
        return max(part.test.certainty(worker) for part in self._parts)

    def _release(self, worker: int) -> None:
        for part in self._parts:
            part.test.release(worker)

    def _measure(self, fault: Fault) -> None:
        """Measure how its workers differ in the steps that show it, in signals with evidence."""
        since = fault.last_step - fault.first_step + 1
        for worker in fault.active[:NAMED_WORKERS]:
            fading = self._certainty(worker) < _FADING
            found = () if fading else self._traces(worker, since, fault.last_step)
            fault.traces[worker] = found or [
                (
                    signal,
                    self._part_of(signal).test.measured_anew(worker, trace, since, fault.last_step),
                )
                for signal, trace in fault.traces[worker]
            ]

    def _part_of(self, signal: WorkerSignal) -> SignalSet:
        return self._groups if signal.group and self._groups is not None else self._totals

    def _traces(self, worker: int, since: int = RECENT, last: int | None = None) -> Traces:
        """Return a worker's traces over ``since`` steps up to ``last``, the strongest first."""
        least = _NOTEWORTHY
        for part in self._parts:
            strongest = part.test.traces(worker)[:1]
            least = max([least, *(_PART_OF_STRONGEST * trace.log_evidence for trace in strongest)])
        found = [
            (part.signals[trace.signal], trace)
            for part in self._parts
            for trace in part.test.traces(worker, least, since, last)
        ]
        return sorted(found, key=lambda pair: -pair[1].log_evidence)

    def _onset(self, worker: int, traces: Traces, gathered: GatheredStep) -> int:
        if not traces:
            return gathered.step
        signal, trace = traces[0]
        return self._part_of(signal).test.onset(worker, trace.signal, trace.kind)

    def _evidence(self, fault: Fault) -> FaultEvidence:
        fault.reported_count = fault.count
        self._measure(fault)
        num_groups = 0 if self._groups is None else len(self._groups.group_names)
        return describe_fault(fault, self._num_workers, self._hosts, self._steps, num_groups)
