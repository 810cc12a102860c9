"""The detector that reads canaries: what all workers computed on the same two batches."""

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
"""By verdict: the finding and its rule, the cause, and what else may be the cause."""

_BETWEEN = (CanaryCause.HARDWARE, CanaryCause.INCONCLUSIVE)
_MOST_TOLD = 16

_WHY_STATE = "their parameters or buffers are known to differ from the others'"
_WHY_HARDWARE = "their parameters and inputs are the same as far as is known, so a device, a \
library or a setting computes differently"
_CHECK_STATE = "See the finding on parameters or buffers: it says which of them differ, and since \
when"
_CHECK_HARDWARE = "Compare device model, driver, library versions and precision settings of \
{ranks} with another worker's; if these are equal, test the device"


class CanaryVerdicts(Detector):
    """What canaries prove: data, state, hardware or non-determinism.

    A canary that agrees proves that a worker's data differ only where the worker does differ, in
    the canary's step too: of a fault that comes and goes that is not known. Otherwise it says
    nothing, as it should in a healthy run.

    Args:
        num_workers: W.
        suspected: Returns the workers that differ from the others at present, in most steps.
    """

    SETTINGS = ("_num_workers", "_suspected")

    def __init__(self, num_workers: int, suspected: Callable[[], Sequence[int]] = tuple) -> None:
        self._num_workers = num_workers
        self._suspected = suspected
        self._differing: dict[int, int] = {}  # when they were last seen to
        self._left_out_at: int | None = None  # when parameters that are not reduced differed
        self._told: dict[str, _Told] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Take one step; speaks when all workers ran a canary in it."""
        gathered = step.gathered
        self._differing |= dict.fromkeys(differing_state(gathered), gathered.step)
        known = {r for r, last in self._differing.items() if gathered.step - last <= LATENESS}
        if any(d.kind is StateKind.LEFT_OUT for d in gathered.differences):
            self._left_out_at = gathered.step
        results = results_of(gathered)
        if results is None:
            return self._settle(known)
        verdict = judge(results, differing=tuple(sorted(known)))
        if verdict.verdict is CanaryCause.DATA and results.suspect not in self._suspected():
            return ()
        if verdict.verdict in _BETWEEN and self._left_out(gathered.step):
            return ()
        key = _KINDS[verdict.verdict][0]
        told = self._told.setdefault(key, _Told(gathered.step))
        told.add(gathered.step, verdict, describe_results(results, verdict))
        return (self._evidence(key, told),)

    def _left_out(self, step: int) -> bool:
        """Return whether workers hold parameters of their own, and so compute what they do."""
        return self._left_out_at is not None and step - self._left_out_at <= 2 * ROLES_EVERY

    def _settle(self, differing: set[int]) -> Iterable[FaultEvidence]:
        """Turn to state what looked like hardware: digests take turns, and may come later."""
        told = self._told.get(DIFFERS)
        if told is None or told.verdict != CanaryCause.HARDWARE:
            return ()
        if not differing & set(told.ranks):
            return ()
        told.verdict = str(CanaryCause.STATE)
        return (self._evidence(DIFFERS, told),)

    def _evidence(self, key: str, told: "_Told") -> FaultEvidence:
        verdict = CanaryCause(told.verdict)
        _, cause, other_causes = _KINDS[verdict]
        numbers: dict[str, Any] = {"canaries": told.count, "verdict": str(verdict), **told.numbers}
        if other_causes:
            numbers["other_causes"] = other_causes
        return FaultEvidence(
            cause=cause,
            severity=self._severity(verdict, told),
            ranks=told.ranks,
            first_step=told.first,
            last_step=told.last,
            count=told.count,
            fields=_fields(told, verdict, self._num_workers),
            numbers=numbers,
            key=key,
        )

    def _severity(self, verdict: CanaryCause, told: "_Told") -> Severity:
        """Some workers that differ from themselves by rounding may only add in any order."""
        some = len(told.ranks) < self._num_workers
        by_order = verdict is CanaryCause.NONDETERMINISTIC and told.within_rounding and some
        if verdict is CanaryCause.DATA or by_order:
            return Severity.NOTE
        if verdict is CanaryCause.STATE:
            return Severity.ERROR
        if verdict is CanaryCause.HARDWARE and not told.within_rounding:
            return Severity.ERROR
        return Severity.WARNING


@dataclass
class _Told(Stateful):
    """The canaries that led to one finding."""

    first: int
    last: int = -1
    count: int = 0
    verdict: str = ""
    ranks: tuple[int, ...] = ()
    within_rounding: bool = True
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, step: int, verdict: CanaryVerdict, numbers: dict[str, Any]) -> None:
        """Take one more."""
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
    return [float(value) for value in values_W[:_MOST_TOLD]]


def _fields(told: _Told, verdict: CanaryCause, num_workers: int) -> dict[str, object]:
    ranks, numbers = name_ranks(told.ranks), told.numbers
    state = verdict is CanaryCause.STATE
    distance = float(numbers["distance"])
    return {
        "step": f"{told.last:,}",
        "workers": count(num_workers, "worker"),
        "suspect": f"rank {numbers['suspect']}",
        "peer": f"rank {numbers['peer']}",
        "loss": f"{numbers['losses'][0]:.4g}",
        "peer_loss": f"{numbers['peer_losses'][0]:.4g}",
        "agree": "agree in every bit" if numbers["same_bits"] else "agree up to rounding",
        "distance": "not finite" if distance == float("inf") else f"{distance:.1e}",
        "why": _WHY_STATE if state else _WHY_HARDWARE,
        "check": _CHECK_STATE if state else _CHECK_HARDWARE.format(ranks=ranks),
    }
