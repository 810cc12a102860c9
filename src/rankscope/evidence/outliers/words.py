"""The words of findings about workers that differ from the others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rankscope.bus.columns import Column, Compared, Compares, Table
from rankscope.bus.detector import FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.words import count
from rankscope.evidence import find_column
from rankscope.stats.bets import BetKind
from rankscope.stats.budget import bound_in_words, false_alarm_bound
from rankscope.stats.exchangeability import SignalTrace

NAMED_WORKERS = 16
"""Workers whose differences a finding lists one by one."""

_NAMED_GROUPS = 5
_SWAP = (
    " Then run one of them on another worker: what follows the batch is data, what stays with the "
    "worker is its parameters or its hardware."
)
_AGREED = " It is the data: in the canary of step {step} all workers computed the same from them."


@dataclass(frozen=True, slots=True)
class WorkerSignal:
    """A signal of the worker as a whole, or of one of its groups of parameters."""

    declared: Column  # its declaration; one in which workers are compared
    group: str = ""  # group of parameters; empty for the worker as a whole

    @property
    def name(self) -> str:
        """Column in the record."""
        return self.declared.name

    @property
    def how(self) -> Compared:
        """How it is compared."""
        assert self.declared.compared is not None
        return self.declared.compared


Traces = Sequence[tuple[WorkerSignal, SignalTrace]]


@dataclass(slots=True)
class Fault:
    """One fault: workers that came to differ at the same time in the same way."""

    key: str  # names it inside the run
    first_step: int
    tie: bool = False  # whether it is unknown which workers are at fault
    ranks: list[int] = field(default_factory=list)  # all workers that it has concerned, ascending
    active: list[int] = field(default_factory=list)
    # how each worker differs, the strongest trace first
    traces: dict[int, Traces] = field(default_factory=dict)
    last_step: int = -1  # the last step that showed it
    count: int = 0  # steps since it was found; for a tie, how often it was found
    reported_count: int = 0  # ``count`` at its last report
    wait: int = 0  # for a tie, steps without any evidence after which it counts as healed
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

    def to_plain(self) -> dict[str, Any]:
        """Return the fault as plain JSON values."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        plain["traces"] = [
            [worker, [_trace_to_plain(*pair) for pair in traces]]
            for worker, traces in self.traces.items()
        ]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Fault":
        """Read what :meth:`to_plain` returned; KeyError, TypeError or ValueError if it is not."""
        fault = cls(**{name: plain[name] for name in _PLAIN})
        fault.traces = {
            int(worker): [_trace_from_plain(*trace) for trace in traces]
            for worker, traces in plain["traces"]
        }
        return fault


_PLAIN = tuple(each.name for each in fields(Fault) if each.name != "traces")


def _trace_to_plain(signal: WorkerSignal, trace: SignalTrace) -> list[Any]:
    numbers = [trace.log_evidence, trace.age, trace.deviation, trace.relative]
    return [signal.name, signal.group, trace.signal, trace.kind.value, *numbers]


def _trace_from_plain(
    name: str, group: str, place: int, kind: str, *numbers: Any
) -> tuple[WorkerSignal, SignalTrace]:
    declared = find_column(Table.GROUPS if group else Table.WORKERS, name)
    return WorkerSignal(declared, group), SignalTrace(place, BetKind(kind), *numbers)


def describe_fault(
    fault: Fault, num_workers: int, hosts: Sequence[str], num_steps: int, num_groups: int
) -> FaultEvidence:
    """Return a fault as evidence, after ``num_steps`` compared steps."""
    groups = _groups(fault, num_groups)
    one = len(fault.ranks) == 1
    words = {
        "differ": "differs" if one else "differ",
        "stand": "stands" if one else "stand",
        "what": _what(fault, num_workers),
        "where": _where(groups, fault),
        "host": _host(fault.ranks, hosts),
        "canary": "" if fault.agreed < 0 else _AGREED.format(step=f"{fault.agreed:,}"),
        "swap": _SWAP if fault.agreed < 0 else "",
        "steps": count(num_steps, "step"),
        "bound": bound_in_words(num_steps),
        "workers": num_workers,
    }
    numbers = {
        "steps_compared": num_steps,
        "false_alarm_probability": false_alarm_bound(num_steps),
        "workers": {str(w): _numbers(fault.traces[w]) for w in fault.ranks[:NAMED_WORKERS]},
    }
    return FaultEvidence(
        cause=_cause(fault),
        severity=_severity(fault, num_workers),
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


def _severity(fault: Fault, num_workers: int) -> Severity:
    """Return how bad it is; a tie among many is more likely meant (domains) than a fault."""
    harmless = fault.absorbed or (fault.tie and num_workers > 3)
    return Severity.NOTE if harmless else Severity.WARNING


def _what(fault: Fault, num_workers: int) -> str:
    """Return the strongest statement for each signal: ``loss +13 %, direction −0.18``.

    Of two workers neither is the odd one: ``loss by a factor of 1.30``.
    """
    pair = num_workers == 2
    found: dict[str, str] = {}
    for worker in sorted(fault.active or fault.ranks, key=lambda w: -_strength(fault.traces[w])):
        traces = fault.traces[worker]
        of_totals = [pair for pair in traces if not pair[0].group]
        for signal, trace in of_totals or traces[:1]:
            size = _apart(signal, trace) if pair else _size(signal, trace)
            whose = f" (rank {worker})" if fault.tie and not pair else ""
            found.setdefault(signal.name, _phrase(signal, trace, size) + whose)
    return ", ".join(found.values()) or "too little by now to tell"


def _strength(traces: Traces) -> float:
    return max((trace.log_evidence for _, trace in traces), default=0.0)


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
    if signal.how.relative and trace.relative and deviation < 1:
        return f"by a factor of {(1 + deviation) / (1 - deviation):.2f}"
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
    if len(set(hosts)) < 2 or len(ranks) < 2:
        return ""
    mine = {hosts[rank] for rank in ranks}
    if len(mine) > 1:
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
