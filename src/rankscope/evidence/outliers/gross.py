"""Gross values: single ones far beyond the other workers', or beyond the whole past.

No alarm within one step can be free of assumptions: an e-value of one step is at most W. So these
are notes, outside of the false-alarm budget.

A gross outlier is compared with the run's past, and is rare: each must be twice as far out as the
last, on any worker.

Gross outliers that come again and again are another note, on the worker to which most of them
belong: were all alike, k or more of n would fall on one worker with a probability of at most
``W·P(Binomial(n, 1/W) >= k)``. Of four workers, eight on one are enough, long before the evidence
within the budget, which grows by a factor W a step at most, has reached its level.

A gross value needs no past: it is a fixed multiple of the largest of its peers'
(:class:`GrossValues`). Only the frequency of reports depends on earlier ones.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rankscope.bus.detector import FaultEvidence, PersistentFault
from rankscope.bus.finding import LATELY, OFTEN, TIMES_LATELY, Severity
from rankscope.bus.step import GatheredStep
from rankscope.bus.words import listed, name_ranks
from rankscope.stats.arrays import Floats, Floats32
from rankscope.stats.state import Stateful

KEY = "gross-outlier"
KEY_AGAIN = "gross-outliers"
KEY_AT_ONCE = "gross-value"


class Gross(NamedTuple):
    """A column in which a value can be gross."""

    name: str
    label: str
    times: float  # a value is gross from this multiple of the largest of its peers on


GROSS = (
    Gross("loss", "loss", 8.0),
    Gross("grad_norm", "gradient norm", 8.0),
    Gross("grad_max", "largest gradient element", 12.0),
)
"""In order of precedence; the largest element shows a corrupted one, which a norm may hide."""

FROM = 30.0
"""Robust standard deviations from which a value can be a gross outlier."""

AGAIN_FROM = 10.0
"""The same for those that come again and again on one worker."""

CHANCE = 1e-4
"""Such values are reported where chance explains them with less probability than this."""

_MOST_COUNTED = 64
_FIRST_SCALES = 3  # steps until the robust scale is of use
_WARM_UP = 50
_FEWEST_WORKERS = 4
_STEPS_TOLD = 8
_RANKS_TOLD = 3
_FREELY = 8  # steps with gross values that are all reported


class GrossOutliers(Stateful):
    """Stores how far out a value has been, and reports values far beyond that."""

    SETTINGS = ("_labels", "_num_workers")

    def __init__(self, labels: Sequence[str], num_workers: int) -> None:
        self._labels = tuple(labels)
        self._num_workers = num_workers
        self._record = FROM / 2
        self._steps = 0
        self._records = PersistentFault()
        self._recent_records: deque[int] = deque(maxlen=_STEPS_TOLD)  # their steps
        self._recent: list[tuple[int, int]] = []  # step and worker
        self._count_reported = 0

    def observe(self, z_SW: Floats32, step: int) -> list[FaultEvidence]:
        """Process a step; ``z_SW`` are distances from the median, in robust standard deviations."""
        self._steps += 1
        if self._num_workers < _FEWEST_WORKERS:
            return []
        signal, worker = divmod(int(z_SW.argmax()), z_SW.shape[1])
        largest = float(z_SW[signal, worker])
        label = self._labels[signal]
        found = []
        broken = largest >= 2 * self._record
        self._record = max(self._record, largest)
        if broken and self._steps > _WARM_UP:
            self._records.see(step, (worker,))
            self._recent_records.append(step)
            found.append(self._evidence(label, worker, largest))
        if largest >= AGAIN_FROM and self._steps > _FIRST_SCALES:
            found += self._see_again(label, worker, largest, step)
        return found

    def _see_again(self, label: str, worker: int, z: float, step: int) -> Iterable[FaultEvidence]:
        """Count far-out values by worker; report if chance does not explain them, then rarely."""
        self._recent = [*self._recent, (step, worker)][-_MOST_COUNTED:]
        own = [at for at, whose in self._recent if whose == worker]
        count = len(own)
        total = len(self._recent)
        share = 1 / self._num_workers
        chance = self._num_workers * math.fsum(  # of so many or more
            math.comb(total, k) * share**k * (1 - share) ** (total - k)
            for k in range(count, total + 1)
        )
        if chance > CHANCE or count < 2 * self._count_reported:
            return
        self._count_reported = count
        yield FaultEvidence(
            cause="inconclusive",
            severity=Severity.NOTE,
            ranks=(worker,),
            first_step=own[0],
            last_step=step,
            count=count,
            fields={
                "count": f"{count:,}",
                "total": f"{total:,}",
                "what": label,
                "step": f"{step:,}",
                "z": f"{z:,.0f}",
                "chance": f"{chance:.0e}",
            },
            numbers={"steps": own[-_STEPS_TOLD:], "of_steps": total, "chance": chance},
            key=KEY_AGAIN,
        )

    def _evidence(self, label: str, worker: int, z: float) -> FaultEvidence:
        seen = self._records
        fields = {
            "step": f"{seen.last:,}",
            "ranks": name_ranks([worker]),
            "what": label,
            "z": f"{z:,.0f}",
        }
        numbers = {
            "steps": list(self._recent_records),
            "robust_standard_deviations": z,
            "signal": label,
        }
        return seen.evidence("inconclusive", Severity.NOTE, seen.ranks, fields, numbers, key=KEY)


class GrossValues(Stateful):
    """Reports a value that is many times the largest of its peers, at once.

    It is a note in the very step, whatever came before, and once per episode: until no step has
    shown any for a while. Of two workers both are named. How many there were in the last 50 steps
    stands in the evidence: three are worth a canary.

    The assumption about a healthy run: logarithms of the workers' values in a step spread like
    normal ones with a standard deviation of at most 0.4 for losses and norms, more than is usual
    even early in training with small batches. Then the largest of W is 8 times the second one with
    a probability of 1e-6 a step for W = 4 or 8, 7e-6 for W = 3 and 2e-4 for W = 2. At 0.5 it is
    1e-4 for W = 4. Largest elements spread by 0.3 to 0.4 in the healthy jobs of the fault bench;
    at 0.5, one is 12 times the second one with a probability of 6e-6 for W = 4, 4e-4 for W = 2.
    With a tail like that of x to the power −a it is 8 to the power −a, whatever W is. So heavy
    tails show now and then: that is no fault, one finding for the whole run, and never more than a
    note. After 8 such steps another one is counted, but reported only if it is twice as far out as
    any before, or the third within 50 steps. Ratios of a signal that has been negative, as losses
    in reinforcement learning are, mean nothing. A worker whose values are ten times the others' is
    seen through their spread: hence 8, not 10.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._seen = PersistentFault()
        self._lately: list[int] = []
        self._signed: set[str] = set()
        self._excess = self._record = 0.0  # excess over the limit: of this step, and of all before
        self._statement = ""
        self._numbers: dict[str, object] = {}
        self._larger: dict[int, int] = {}  # steps by the worker with the larger value

    def observe(self, gathered: GatheredStep, left_out: Sequence[int]) -> list[FaultEvidence]:
        """Process a step; values that are not positive and finite are not compared."""
        step = gathered.step
        ranks = set[int]()
        self._excess = 0.0
        larger = -1
        for column in reversed(GROSS):
            first = self._compare(column, gathered.workers[column.name], left_out, step)
            if first >= 0:
                larger = first
                ranks |= {0, 1} if self._num_workers == 2 else {first}
        self._lately = [at for at in self._lately if at > step - LATELY]
        if ranks:
            self._lately.append(step)
            self._larger[larger] = self._larger.get(larger, 0) + 1
        seen = self._seen
        broken = self._excess >= 2 * self._record
        reported = seen.count < _FREELY or broken or len(self._lately) >= OFTEN
        quiet = bool(ranks) and not reported
        self._record = max(self._record, self._excess)
        seen.count += quiet
        if not seen.observe(step, () if quiet else ranks):
            return []
        fields = {"what": self._statement, "whose": self._whose(), "single": ""}
        if seen.count == 1:
            fields["single"] = " A single step proves nothing."
        numbers = {"steps": seen.count, TIMES_LATELY: len(self._lately), **self._numbers}
        key = KEY_AT_ONCE
        return [seen.evidence("inconclusive", Severity.NOTE, seen.ranks, fields, numbers, key=key)]

    def _whose(self) -> str:
        """Return whose values were the larger ones, in several steps; empty in one."""
        if self._seen.count < 2:
            return ""
        most = sorted(self._larger.items(), key=lambda pair: -pair[1])
        if len(most) == 1:
            return f", in each of them {name_ranks(self._larger)}'s the larger"
        shown = [f"{name_ranks([rank])}'s in {steps:,}" for rank, steps in most[:_RANKS_TOLD]]
        if others := sum(steps for _, steps in most[_RANKS_TOLD:]):
            shown.append(f"others' in {others:,}")
        return f"; the larger was {listed(shown)}"

    def _compare(self, column: Gross, values_W: Floats, left_out: Sequence[int], step: int) -> int:
        """Return the worker whose value is gross, -1 if none is; of two, that of the larger."""
        label = column.label
        if (values_W < 0).any():
            self._signed.add(label)
        known_W = np.isfinite(values_W) & (values_W > 0)
        known_W[list(left_out)] = False
        if label in self._signed or np.count_nonzero(known_W) < 2:
            return -1
        ranks = np.flatnonzero(known_W)
        second, first = map(int, ranks[np.argsort(values_W[ranks])[-2:]])
        value = float(values_W[first])
        peer = float(values_W[second])
        if value < column.times * peer:
            return -1
        self._excess = max(self._excess, value / peer / column.times)
        self._numbers = {"signal": label, "times": value / peer, "value": value, "next": peer}
        if self._num_workers == 2:
            self._statement = (
                f"At step {step:,} ranks 0 and 1 differed in their {label} by a factor of "
                f"{value / peer:,.1f}: {values_W[0]:.3g} and {values_W[1]:.3g}"
            )
            return first
        self._statement = (
            f"At step {step:,} the {label} of {name_ranks([first])} was {value / peer:,.1f} times "
            f"the largest of the other workers': {value:.3g} against {peer:.3g}"
        )
        return first
