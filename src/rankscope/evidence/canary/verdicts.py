"""The detector of canaries: it compares all workers' results on the same two batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateKind
from rankscope.bus.rules import LATENESS
from rankscope.bus.steps import Step
from rankscope.bus.words import count, name_ranks
from rankscope.evidence.canary.verdict import (
    CanaryCause,
    CanaryResults,
    CanaryVerdict,
    differing_state,
    judge,
    results_of,
)
from rankscope.evidence.state.roles import ROLES_EVERY
from rankscope.stats.arrays import Floats
from rankscope.stats.state import Stateful

DATA = "canary-data"
DIFFERS = "canary-differs"
NONDETERMINISTIC = "canary-nondeterministic"
INCONCLUSIVE = "canary-inconclusive"
CANARIES = (DATA, DIFFERS, NONDETERMINISTIC, INCONCLUSIVE)
"""Findings of this detector."""

_KINDS: Mapping[CanaryCause, tuple[str, str, list[str]]] = {
    CanaryCause.DATA: (DATA, "data.worker_outlier", []),
    CanaryCause.STATE: (DIFFERS, "state.parameters_differ", []),
    CanaryCause.HARDWARE: (
        DIFFERS,
        "compute.worker_outlier",
        ["state.parameters_differ", "env.mismatch"],
    ),
    CanaryCause.NONDETERMINISTIC: (
        NONDETERMINISTIC,
        "compute.nondeterministic",
        ["compute.worker_outlier"],
    ),
    CanaryCause.INCONCLUSIVE: (
        INCONCLUSIVE,
        "inconclusive",
        ["compute.worker_outlier", "state.parameters_differ", "env.mismatch"],
    ),
}
"""By verdict: the finding and its rule, the cause, and other possible causes."""

_BETWEEN = (CanaryCause.HARDWARE, CanaryCause.INCONCLUSIVE)
_MOST_RECORDED = 16

_WHY_STATE = "their parameters or buffers are known to differ from the others'"
_WHY_HARDWARE = "their parameters and inputs are the same as far as is known, so a device, a \
library or a setting computes differently"
_CHECK_STATE = "See the finding on parameters or buffers: it says which of them differ, and since \
when"
_CHECK_HARDWARE = "Compare device model, driver, library versions and precision settings of \
{ranks} with another worker's; if these are equal, test the device"


class CanaryVerdicts(Detector):
    """Reports whether canaries prove data, state, hardware or non-determinism.

    A canary on which all workers agree proves a fault in the data only while the suspect differs
    from the others in most steps. Else there is no finding, as in a healthy run.

    Args:
        num_workers: W.
        suspected: Returns the workers that differ from the others at present, in most steps.
    """

    SETTINGS = ("_num_workers", "_suspected")

    def __init__(self, num_workers: int, suspected: Callable[[], Sequence[int]] = tuple) -> None:
        self._num_workers = num_workers
        self._suspected = suspected
        self._differing: dict[int, int] = {}  # the last step of each, by rank
        self._left_out_at: int | None = None  # last step in which unreduced parameters differed
        self._faults: dict[str, _CanaryFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report the result if all workers ran a canary in it."""
        gathered = step.gathered
        self._differing |= dict.fromkeys(differing_state(gathered), gathered.step)
        differing = {r for r, last in self._differing.items() if gathered.step - last <= LATENESS}
        if any(d.kind is StateKind.LEFT_OUT for d in gathered.differences):
            self._left_out_at = gathered.step
        results = results_of(gathered)
        if results is None:
            return self._settle(differing)
        verdict = judge(results, differing=tuple(sorted(differing)))
        if verdict.verdict is CanaryCause.DATA and results.suspect not in self._suspected():
            return ()
        if verdict.verdict in _BETWEEN and self._left_out(gathered.step):
            return ()
        key = _KINDS[verdict.verdict][0]
        fault = self._faults.setdefault(key, _CanaryFault(gathered.step))
        fault.add(gathered.step, verdict, describe_results(results, verdict))
        return (self._evidence(key, fault),)

    def _left_out(self, step: int) -> bool:
        """Return whether workers hold parameters of their own, which explain other results."""
        return self._left_out_at is not None and step - self._left_out_at <= 2 * ROLES_EVERY

    def _settle(self, differing: set[int]) -> Iterable[FaultEvidence]:
        """Change a verdict of hardware to state, if a digest shows a difference later."""
        fault = self._faults.get(DIFFERS)
        if fault is None or fault.verdict != CanaryCause.HARDWARE:
            return ()
        if not differing & set(fault.ranks):
            return ()
        fault.verdict = str(CanaryCause.STATE)
        return (self._evidence(DIFFERS, fault),)

    def _evidence(self, key: str, fault: "_CanaryFault") -> FaultEvidence:
        verdict = CanaryCause(fault.verdict)
        _, cause, other_causes = _KINDS[verdict]
        numbers: dict[str, Any] = {
            "canaries": fault.count,
            "verdict": str(verdict),
            **fault.numbers,
        }
        if other_causes:
            numbers["other_causes"] = other_causes
        return FaultEvidence(
            cause=cause,
            severity=self._severity(verdict, fault),
            ranks=fault.ranks,
            first_step=fault.first,
            last_step=fault.last,
            count=fault.count,
            fields=_fields(fault, verdict, self._num_workers),
            numbers=numbers,
            key=key,
        )

    def _severity(self, verdict: CanaryCause, fault: "_CanaryFault") -> Severity:
        """Return the severity; some workers may only add in any order, which is a note."""
        some = len(fault.ranks) < self._num_workers
        by_order = verdict is CanaryCause.NONDETERMINISTIC and fault.within_rounding and some
        if verdict is CanaryCause.DATA or by_order:
            return Severity.NOTE
        if verdict is CanaryCause.STATE:
            return Severity.ERROR
        if verdict is CanaryCause.HARDWARE and not fault.within_rounding:
            return Severity.ERROR
        return Severity.WARNING


@dataclass
class _CanaryFault(Stateful):
    """The canaries that led to one finding."""

    first: int
    last: int = -1
    count: int = 0
    verdict: str = ""
    ranks: tuple[int, ...] = ()
    within_rounding: bool = True
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, step: int, verdict: CanaryVerdict, numbers: dict[str, Any]) -> None:
        """Add a canary."""
        self.last = step
        self.count += 1
        self.verdict = str(verdict.verdict)
        self.ranks = tuple(sorted({*self.ranks, *verdict.ranks}))
        self.within_rounding = self.within_rounding and verdict.within_rounding
        self.numbers = numbers


def describe_results(results: CanaryResults, verdict: CanaryVerdict) -> dict[str, Any]:
    """Return the numbers behind a verdict, by name."""
    return {
        "suspect": results.suspect,
        "peer": results.peer,
        "distance": verdict.distance,
        "same_bits": verdict.exact,
        "losses": _first(results.losses_W),
        "gradient_norms": _first(results.norms_W),
        "peer_losses": _first(results.peer_losses_W),
        "peer_gradient_norms": _first(results.peer_norms_W),
    }


def _first(values_W: Floats) -> list[float]:
    return [float(value) for value in values_W[:_MOST_RECORDED]]


def _fields(fault: _CanaryFault, verdict: CanaryCause, num_workers: int) -> dict[str, object]:
    numbers = fault.numbers
    state = verdict is CanaryCause.STATE
    distance = float(numbers["distance"])
    return {
        "step": f"{fault.last:,}",
        "workers": count(num_workers, "worker"),
        "suspect": f"rank {numbers['suspect']}",
        "peer": f"rank {numbers['peer']}",
        "loss": f"{numbers['losses'][0]:.4g}",
        "peer_loss": f"{numbers['peer_losses'][0]:.4g}",
        "agree": "agree in every bit" if numbers["same_bits"] else "agree up to rounding",
        "distance": "not finite" if distance == float("inf") else f"{distance:.1e}",
        "why": _WHY_STATE if state else _WHY_HARDWARE,
        "check": _CHECK_STATE if state else _CHECK_HARDWARE.format(ranks=name_ranks(fault.ranks)),
    }
