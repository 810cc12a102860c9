"""The detector of canaries: it compares all workers' results on the same two batches."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.bus.bundles import latest_bundle
from rankscope.bus.canary import (
    CanaryCause,
    CanaryResults,
    CanaryVerdict,
    describe_size,
    differing_state,
    judge_step,
    name_reasons,
    results_of,
    why,
)
from rankscope.bus.detector import (
    LATENESS,
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
)
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.pace import LAG
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import trains_alone
from rankscope.bus.steps import Step
from rankscope.bus.words import all_workers, name_ranks
from rankscope.evidence.state.roles import ROLES_EVERY

CANARY_STEPS = 3 * LAG
"""Steps until the first canary is judged."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (CanaryVerdicts(run.num_workers, run.flagged.steadily),)


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    why = f": {known}" if (known := run.unmeasured.get("canary")) else ""
    impossible = "" if run.options.get("canary", True) else f"no canary can run here{why}"
    what = "a worker that computes other results from the same batch"
    pending = f"no canary has run yet{why}" if run.canaries is False and not impossible else ""
    return (Check(what, CANARY_STEPS, impossible, pending),)


def next_command(run_dir: Path, finding: Finding, answer: Finding) -> str:
    """Return the command that replays the batches of a finding, or of the one that settles it.

    It can be pasted in any directory.
    """
    until = answer.last_step if answer.id in CANARIES else -1
    both = (finding, answer)
    over = all(one.status == "closed" for one in both)
    over_by = max(one.last_step for one in both) if over else None
    bundle = latest_bundle(run_dir, {finding.id, answer.id}, until, over_by)
    return "" if bundle is None else f"rankscope replay {shlex.quote(str(bundle.absolute()))}"


DATA = "canary-data"
CODE = "canary-code"
DIFFERS = "canary-differs"
NONDETERMINISTIC = "canary-nondeterministic"
INCONCLUSIVE = "canary-inconclusive"
CANARIES = (DATA, CODE, DIFFERS, NONDETERMINISTIC, INCONCLUSIVE)
"""Findings of this detector."""

_KINDS: Mapping[CanaryCause, tuple[str, str, list[str]]] = {
    CanaryCause.DATA: (DATA, "data.worker_outlier", []),
    CanaryCause.CODE: (CODE, "compute.code_differs", []),
    CanaryCause.SETTINGS: (CODE, "env.mismatch", ["compute.code_differs"]),
    CanaryCause.STATE: (DIFFERS, "state.parameters_differ", []),
    CanaryCause.HARDWARE: (
        DIFFERS,
        "compute.worker_outlier",
        ["compute.code_differs", "state.parameters_differ", "env.mismatch"],
    ),
    CanaryCause.NONDETERMINISTIC: (
        NONDETERMINISTIC,
        "compute.nondeterministic",
        ["compute.worker_outlier"],
    ),
    CanaryCause.INCONCLUSIVE: (
        INCONCLUSIVE,
        "inconclusive",
        [
            "compute.code_differs",
            "state.parameters_differ",
            "env.mismatch",
            "compute.worker_outlier",
        ],
    ),
}
"""By verdict: the finding and its rule, the cause, and other possible causes."""

_BETWEEN = (CanaryCause.HARDWARE, CanaryCause.INCONCLUSIVE)
_MOST_RECORDED = 16


class CanaryVerdicts(Detector):
    """Reports whether canaries prove data, code, state, hardware or non-determinism.

    A canary on which all workers agree proves a fault in the data only while the suspect differs
    from the others in most steps. Else there is no finding, as in a healthy run.
    """

    SETTINGS = ("_num_workers", "_suspected")

    def __init__(self, num_workers: int, suspected: Callable[[], Sequence[int]] = tuple) -> None:
        self._num_workers = num_workers
        self._suspected = suspected  # workers that differ at present, in most steps
        self._differing: dict[int, int] = {}  # the last step of each, by rank
        self._left_out_at: int | None = None  # last step in which unreduced parameters differed
        self._alone = False  # whether each worker trained alone when that was known last
        self._faults: dict[str, _CanaryFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report the result if all workers ran a canary in it."""
        gathered = step.gathered
        self._differing |= dict.fromkeys(differing_state(gathered), gathered.step)
        differing = {r for r, last in self._differing.items() if gathered.step - last <= LATENESS}
        alone_now = trains_alone(gathered)
        self._alone = self._alone if alone_now is None else alone_now
        if any(d.kind is StateKind.LEFT_OUT for d in gathered.differences):
            self._left_out_at = gathered.step
        results = results_of(gathered)
        if results is None:
            return self._settle(differing)
        verdict = judge_step(gathered, results, differing=tuple(sorted(differing)))
        if verdict.verdict is CanaryCause.DATA and results.suspect not in self._suspected():
            return ()
        left_out_at = self._left_out_at
        own = left_out_at is not None and gathered.step - left_out_at <= 2 * ROLES_EVERY
        state = verdict.verdict is CanaryCause.STATE
        explained = verdict.verdict in _BETWEEN or (state and not differing)
        if (own and explained) or (state and self._alone):
            return ()  # workers hold parameters of their own, which explain other results
        key = _KINDS[verdict.verdict][0]
        fault = self._faults.setdefault(key, _CanaryFault())
        fault.add(gathered.step, verdict, results)
        return (self._evidence(key, fault),)

    def _settle(self, differing: set[int]) -> Iterable[FaultEvidence]:
        """Change a verdict of hardware to state, if a digest shows a difference later."""
        fault = self._faults.get(DIFFERS)
        if fault is None or fault.verdict != CanaryCause.HARDWARE:
            return ()
        if not differing & fault.ranks:
            return ()
        fault.verdict = str(CanaryCause.STATE)
        return (self._evidence(DIFFERS, fault),)

    def _evidence(self, key: str, fault: "_CanaryFault") -> FaultEvidence:
        verdict = CanaryCause(fault.verdict)
        _, cause, other_causes = _KINDS[verdict]
        numbers = {"canaries": fault.count, "verdict": str(verdict), **fault.numbers}
        if other_causes:
            numbers["other_causes"] = other_causes
        severity = self._severity(verdict, fault)
        fields = _fields(fault, verdict, self._num_workers)
        return fault.evidence(cause, severity, fault.ranks, fields, numbers, key=key)

    def _severity(self, verdict: CanaryCause, fault: "_CanaryFault") -> Severity:
        """Return the severity; some workers may only add in any order, which is a note."""
        some = len(fault.ranks) < self._num_workers
        by_order = verdict is CanaryCause.NONDETERMINISTIC and fault.within_rounding and some
        if verdict is CanaryCause.DATA or by_order:
            return Severity.NOTE
        if verdict is CanaryCause.STATE:
            return Severity.ERROR
        between = (CanaryCause.HARDWARE, CanaryCause.CODE, CanaryCause.SETTINGS)
        if verdict in between and not fault.within_rounding:
            return Severity.ERROR
        return Severity.WARNING


class _CanaryFault(PersistentFault):
    """The canaries that led to one finding."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict = ""
        self.within_rounding = True
        self.size = ""
        self.reasons: tuple[str, ...] = ()
        self.hooks: tuple[str, ...] = ()
        self.compared = False
        self.numbers: dict[str, Any] = {}

    def add(self, step: int, verdict: CanaryVerdict, results: CanaryResults) -> None:
        """Add a canary."""
        self.see(step, verdict.ranks)
        self.verdict = str(verdict.verdict)
        self.within_rounding &= verdict.distance <= results.rounding
        self.size = describe_size(results, verdict.ranks)
        self.reasons = verdict.reasons
        self.hooks = verdict.hooks
        self.compared = verdict.compared
        self.numbers = {
            "suspect": results.suspect,
            "peer": results.peer,
            "distance": verdict.distance,
            "same_bits": verdict.exact,
            "projected": results.projected,
            "differs": list(verdict.reasons),
            "losses": results.losses_W[:_MOST_RECORDED].tolist(),
            "gradient_norms": results.norms_W[:_MOST_RECORDED].tolist(),
            "peer_losses": results.peer_losses_W[:_MOST_RECORDED].tolist(),
            "peer_gradient_norms": results.peer_norms_W[:_MOST_RECORDED].tolist(),
        }


def _fields(fault: _CanaryFault, verdict: CanaryCause, num_workers: int) -> dict[str, object]:
    numbers = fault.numbers
    one = len(fault.ranks) == 1
    others = ""  # what is known of the workers that repeat themselves
    if fault.compared and len(fault.ranks) != num_workers:
        others = f". The others repeat theirs, and {why(verdict, (), fault.hooks, compared=True)}"
    return {
        "step": f"{fault.last:,}",
        "everyone": all_workers(num_workers),
        "Everyone": all_workers(num_workers).capitalize(),
        "computes": "computes a different result" if one else "compute different results",
        "repeats": "does not repeat its own result" if one else "do not repeat their own results",
        "size": fault.size,
        "suspect": name_ranks([numbers["suspect"]]),
        "peer": name_ranks([numbers["peer"]]),
        "results": _results_in_words(numbers),
        "agree": "agree in every bit" if numbers["same_bits"] else "agree up to rounding",
        "why": why(verdict, fault.reasons, fault.hooks, compared=fault.compared),
        "others": others,
        "check": _check(verdict, fault, num_workers),
    }


def _results_in_words(numbers: Mapping[str, Any]) -> str:
    """Return what all workers computed of both batches."""
    projected = numbers.get("projected", False)
    name = "a projection of the outputs" if projected else "the loss"
    suspect = name_ranks([numbers["suspect"]])
    peer = name_ranks([numbers["peer"]])
    loss, peer_loss = (numbers[key][0] for key in ("losses", "peer_losses"))
    outside = ". The loss outside of the model is not among what ran" if projected else ""
    return (
        f"{name} of {suspect}'s batch was {loss:.4g} on every worker, that of {peer}'s "
        f"{peer_loss:.4g}{outside}"
    )


def _check(verdict: CanaryCause, fault: _CanaryFault, num_workers: int) -> str:
    named = name_ranks(fault.ranks)
    if verdict is CanaryCause.STATE:
        return (
            "Compare parameters and buffers of the ranks: see the finding on them, which says "
            "since when they differ, and load one checkpoint on all ranks"
        )
    first = fault.reasons[0] if fault.reasons else "what the canary runs"
    if verdict is CanaryCause.CODE:
        where = named if len(fault.ranks) < num_workers else "one of them"
        return (
            f"Make this equal on all ranks: {first}. Look for a branch on the rank, a mode or an "
            f"option that is set on {where} only, or another version of the code"
        )
    if verdict is CanaryCause.SETTINGS:
        return f"Start {named} with the settings, libraries and device of the others: {first}"
    if verdict is CanaryCause.INCONCLUSIVE:
        look = f"Compare parameters, devices, versions and precision of {named}"
        if fault.compared:
            look = f"Look at {name_reasons(fault.hooks)}" if fault.hooks else f"Test {named}"
        return f"{look}, or run the same batches on another machine: rankscope replay with --model"
    if not fault.compared:
        return f"Compare code, settings and versions of {named} with another worker's"
    look = f"Look at {name_reasons(fault.hooks)}; else test" if fault.hooks else "Test"
    return f"{look} the device of {named}, or move the rank to another one"
