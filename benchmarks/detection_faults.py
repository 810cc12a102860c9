"""Simulated faults of single workers, pairs, blocks and hosts: how long they go unnoticed.

The values go through the whole diagnosis of the product: loss, gradient norm and direction of
every worker, and norm and direction of 40 groups, at the threshold of the product.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from detection_streams import Floats
from numpy.random import Generator

from rankscope.bus.detector import RunFacts
from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.evidence import columns_of
from rankscope.stats.arrays import MISSING_INT
from rankscope.verdict.diagnosis import Diagnosis

Row = dict[str, Any]
GROUPS = tuple(f"layers.{index}" for index in range(40))
FAULTY = 5
START = 50
_MISSING = {DType.FLOAT: np.nan, DType.INT: MISSING_INT, DType.BOOL: False}
_DTYPES = {DType.FLOAT: np.float64, DType.INT: np.int64, DType.BOOL: np.bool_}


@dataclass(slots=True)
class Noise:
    """Standard normal values of one step, for faults to change.

    Attributes:
        loss_W: Of the loss.
        norm_W: Of the gradient norm.
        cosine_W: Of the leave-one-out cosine.
        group_norm_WG: Of the groups' norms; they share a part with the worker's norm.
        group_cosine_WG: Of the groups' cosines.
        pairs_WW: Of the pairwise cosines, symmetric.
    """

    loss_W: Floats
    norm_W: Floats
    cosine_W: Floats
    group_norm_WG: Floats
    group_cosine_WG: Floats
    pairs_WW: Floats

    @classmethod
    def draw(cls, rng: Generator, workers: int) -> "Noise":
        """Draw a healthy step."""
        groups = (workers, len(GROUPS))
        norm_W, cosine_W = rng.standard_normal((2, workers))
        pairs_WW = np.triu(rng.standard_normal((workers, workers)), 1)
        return cls(
            rng.standard_normal(workers),
            norm_W,
            cosine_W,
            0.6 * norm_W[:, None] + 0.8 * rng.standard_normal(groups),
            0.6 * cosine_W[:, None] + 0.8 * rng.standard_normal(groups),
            pairs_WW + pairs_WW.T,
        )

    def to_report(self, step: int) -> StepReport:
        """Return the step as the record would hold it, in units of a usual training."""
        workers = len(self.loss_W)
        local: dict[str, Any] = {
            s.name: np.full(workers, _MISSING[s.dtype], _DTYPES[s.dtype])
            for s in columns_of(Table.WORKERS, Source.LOCAL)
        }
        local["loss"] = 3 + 0.1 * self.loss_W
        local["grad_norm"] = 2 * np.exp(0.07 * self.norm_W)
        cosines_WW = np.clip(0.07 + 0.02 * self.pairs_WW, -1, 1)
        np.fill_diagonal(cosines_WW, 1)
        gathered = GatheredStep(
            step=step,
            time=float(step),
            observed=True,
            workers=local,
            sketches_WK=None,
            samples=(np.empty(0, np.int64),) * workers,
            groups=GROUPS,
            group_norms_WG=0.3 * np.exp(0.1 * self.group_norm_WG),
        )
        return StepReport(
            gathered,
            {s.name: float("nan") for s in columns_of(Table.STEPS, Source.DERIVED)},
            {"cosine_rest": 0.2 + 0.03 * self.cosine_W},
            cosines_WW if workers <= 64 else None,
            0.2 + 0.05 * self.group_cosine_WG,
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to simulate.

    Attributes:
        words: What it is.
        change: Changes a step's noise, given how many steps ago the fault began.
        ranks: Who has it.
        steps: How long to look for it.
        repetitions: How often to try.
        workers: W.
        start: Its first step.
        lasts: Steps after which it heals; None for good.
        target: Median delay that is asked for.
        hosts: Host of each rank.
    """

    words: str
    change: Callable[[Noise, int, Generator], None]
    ranks: tuple[int, ...] = (FAULTY,)
    steps: int = 200
    repetitions: int = 40
    workers: int = 8
    start: int = START
    lasts: int | None = None
    target: int | None = None
    hosts: tuple[str, ...] = ()


def shift(size: float, *ranks: int) -> Callable[[Noise, int, Generator], None]:
    """Shift the loss of workers by so many standard deviations."""

    def change(noise: Noise, since: int, rng: Generator) -> None:
        noise.loss_W[list(ranks)] += size

    return change


def spread(factor: float) -> Callable[[Noise, int, Generator], None]:
    """Make the loss of a worker scatter more."""

    def change(noise: Noise, since: int, rng: Generator) -> None:
        noise.loss_W[FAULTY] *= factor

    return change


def alike(size: float, *ranks: int) -> Callable[[Noise, int, Generator], None]:
    """Let the directions of these workers resemble each other more."""

    def change(noise: Noise, since: int, rng: Generator) -> None:
        for i in ranks:
            noise.pairs_WW[i, [j for j in ranks if j != i]] += size

    return change


def rare_errors(noise: Noise, since: int, rng: Generator) -> None:
    """Put a large error into every fifth loss, up or down."""
    if since % 5 == 0:
        noise.loss_W[FAULTY] += 6.5 * rng.choice([-1, 1])


def norm_up(noise: Noise, since: int, rng: Generator) -> None:
    """Raise the gradient norm of a worker."""
    noise.norm_W[FAULTY] += 1.5


def direction_down(noise: Noise, since: int, rng: Generator) -> None:
    """Turn the gradient of a worker away."""
    noise.cosine_W[FAULTY] -= 1.5


def group_norm_up(noise: Noise, since: int, rng: Generator) -> None:
    """Raise the gradient norm of one group of a worker."""
    noise.group_norm_WG[FAULTY, 17] += 1.5


HOST = tuple(range(16, 24))
HOSTS = tuple(f"node{rank // 8}" for rank in range(64))
FAULTS = (
    Fault("loss + 0.77 sd", shift(0.77, FAULTY), repetitions=200, target=90, steps=300),
    Fault("loss + 1.5 sd", shift(1.5, FAULTY), repetitions=200, target=30),
    Fault("loss + 3.5 sd", shift(3.5, FAULTY), repetitions=200, target=13),
    Fault("loss − 1.5 sd", shift(-1.5, FAULTY)),
    Fault("gradient norm + 1.5 sd", norm_up),
    Fault("direction − 1.5 sd", direction_down),
    Fault("loss ± 6.5 sd in every fifth step", rare_errors, target=100, repetitions=100),
    Fault("loss: spread × 2", spread(2), steps=400),
    Fault("loss: spread × 3", spread(3)),
    Fault("two workers, loss + 1.5 sd", shift(1.5, 2, FAULTY), (2, FAULTY)),
    Fault("norm of one of 40 groups + 1.5 sd", group_norm_up),
    Fault("loss + 1.5 sd from step 5,000", shift(1.5, FAULTY), start=5000, repetitions=8),
    Fault("loss + 1.5 sd, heals after 150 steps", shift(1.5, FAULTY), lasts=150, steps=400),
    Fault("a pair with cosines + 3 sd", alike(3, 2, FAULTY), (2, FAULTY)),
    Fault("a block of three with cosines + 2 sd", alike(2, 1, 4, FAULTY), (1, 4, FAULTY)),
    Fault(
        "a host of 8 of 64 workers, loss + 1.5 sd",
        shift(1.5, *HOST),
        HOST,
        workers=64,
        hosts=HOSTS,
        repetitions=10,
    ),
)


@dataclass(slots=True)
class Outcome:
    """What the diagnosis said of one run.

    Attributes:
        delay: Steps from the start of the fault to the first alarm, the alarming step included.
        before: Whether there was an alarm before the fault.
        told: Ranks that the first finding named.
        last: Ranks of all open alarms a while later.
        findings: How many findings were alarms.
        closed: Steps from the end of the fault until its finding was closed.
        onset: By how many steps the change-point estimate is off.
    """

    delay: float = float("inf")
    before: bool = False
    told: tuple[int, ...] = ()
    last: set[int] = field(default_factory=set)
    findings: set[str] = field(default_factory=set)
    closed: float = float("inf")
    onset: float = float("nan")


def simulate(fault: Fault, rng: Generator, settle: int = 30) -> Outcome:
    """Run one job with the fault until it is found, and a while longer to see who is named."""
    diagnosis = Diagnosis(RunFacts(fault.workers, fault.hosts))
    outcome, stop = Outcome(), fault.start + fault.steps
    for step in range(fault.start + fault.steps):
        noise, since = Noise.draw(rng, fault.workers), step - fault.start
        if 0 <= since < (fault.lasts or np.inf):
            fault.change(noise, since, rng)
        for event in diagnosis.observe(noise.to_report(step)):
            _note(outcome, event, since, fault)
        if np.isfinite(outcome.delay) and fault.lasts is None:
            stop = min(stop, int(fault.start + outcome.delay) + settle)
        if outcome.before or step >= stop:
            break
    outcome.last = {
        rank
        for finding in diagnosis.findings
        if finding.severity >= Severity.WARNING and (finding.status == "open" or fault.lasts)
        for rank in finding.ranks
    }
    return outcome


def _note(outcome: Outcome, event: Finding, since: int, fault: Fault) -> None:
    if event.severity < Severity.WARNING:
        return
    outcome.before |= since < 0
    outcome.findings.add(event.id)
    if outcome.delay == np.inf:
        outcome.delay, outcome.told = since + 1, event.ranks
        outcome.onset = event.first_step - fault.start
    if event.status == "closed" and fault.lasts is not None:
        outcome.closed = min(outcome.closed, since - fault.lasts)


def measure(fault: Fault, scale: float = 1.0) -> Row:
    """Return the row of a fault."""
    repetitions = max(4, int(fault.repetitions * scale))
    rng = np.random.default_rng(zlib.crc32(fault.words.encode()))
    outcomes = [simulate(fault, rng) for _ in range(repetitions)]
    delays = [outcome.delay for outcome in outcomes]
    found = [outcome for outcome in outcomes if np.isfinite(outcome.delay)]
    row = {
        "words": fault.words,
        "repetitions": repetitions,
        "target": fault.target,
        "median": float(np.median(delays)),
        "late": float(np.quantile(delays, 0.9, method="inverted_cdf")),
        "found": len(found) / repetitions,
        "told": sum(set(o.told) <= set(fault.ranks) for o in found) / max(1, len(found)),
        "right": sum(o.last == set(fault.ranks) for o in found) / max(1, len(found)),
        "findings": float(np.mean([len(o.findings) for o in found])) if found else 0.0,
        "before": sum(o.before for o in outcomes),
        "onset": float(np.median(np.abs([o.onset for o in found]))) if found else None,
        "closed": float(np.median([o.closed for o in outcomes])) if fault.lasts else None,
    }
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}


def measure_healthy(steps: int) -> Row:
    """Run the whole diagnosis on a healthy job."""
    rng = np.random.default_rng(99)
    diagnosis = Diagnosis(RunFacts(8))
    for step in range(steps):
        diagnosis.observe(Noise.draw(rng, 8).to_report(step))
    severe = [f for f in diagnosis.findings if f.severity >= Severity.WARNING]
    return {"steps": steps, "alarms": len(severe), "notes": len(diagnosis.findings) - len(severe)}


if __name__ == "__main__":
    for case in FAULTS:
        print(measure(case, 0.1), flush=True)
