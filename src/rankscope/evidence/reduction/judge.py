"""The detector of reductions that do not return the mean of the local gradients.

It works on norms: the expected norm of the reduced gradient follows from the workers' norms and
cosines. A single step proves nothing, a ratio that stays the same over many steps does.

For W gradients g_i with mean m:

    W^2 |m|^2  =  sum_i |g_i|^2  +  sum_{i != j} g_i . g_j

and the last sum is ``cosine_weighted * sum_{i != j} |g_i| |g_j|``. With cosines from sketches of
width k the norm of the mean is known to about ``sqrt(2/k)`` of it, 2 % for k = 4,093, as long as
the gradients do not oppose each other.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from rankscope.bus.checks import Check, CheckedRun
from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.run import RunFacts
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.weighting import common_scale
from rankscope.bus.words import count
from rankscope.evidence.reduction.accumulation import AccumulationAudit, ChangedLater
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.stats.arrays import Floats

LEAST_SHARE = 0.25
"""Of ``sum |g_i|^2``: where ``W^2 |m|^2`` is smaller, gradients oppose each other too much."""


def norm_of_mean(norms_W: Floats, cosine_weighted: float) -> float:
    """Return the norm of the mean of W gradients.

    ``cosine_weighted``: their mean cosine, weighted by the products of norms. Returns NaN where the
    norm cannot be found.
    """
    if len(norms_W) < 2 or not math.isfinite(cosine_weighted):
        return float("nan")
    scale = float(norms_W.max())
    if not 0 < scale < math.inf or norms_W.min() < 0:
        return float("nan")
    scaled_W = norms_W / scale
    squares = float((scaled_W * scaled_W).sum())
    products = float(scaled_W.sum()) ** 2 - squares
    total = squares + cosine_weighted * products
    if total < LEAST_SHARE * squares:
        return float("nan")
    return scale * math.sqrt(total) / len(norms_W)


def clip_limit(reduced_norm: float, cosine_mean: float, num_workers: int) -> float:
    """Return the length that all W gradients had when they were reduced, if all had the same.

    Unit vectors with mean cosine c have a mean of norm ``sqrt((1 + (W - 1) c) / W)``. Returns NaN
    where the length cannot be found.
    """
    share = (1 + (num_workers - 1) * cosine_mean) / num_workers
    if not math.isfinite(share) or share * num_workers < LEAST_SHARE:
        return float("nan")
    return reduced_norm / math.sqrt(share)


STEPS = 16
"""Observed steps that must agree."""

STEPS_APPLIED = STEPS // 2
"""Steps that must agree on a factor after the reduction, which is measured, not estimated."""

APART = 0.2
"""Relative distance of the reduced from the expected norm, from which it is wrong."""

STEADY = 0.04
"""Relative spread of a ratio that stays the same: twice what sketches leave."""

_LOW = 0.97
_HIGH = 1.03  # inside exp(±STEADY): no test of a ratio's logarithm begins there
_EXACT = 2e-3
_PINNED = 1e-4


class ReductionChecks(Detector):
    """Wrong scale, stale results, and gradients clipped before the reduction."""

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._history: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._applied: deque[float] = deque(maxlen=STEPS_APPLIED)
        self._pinned: deque[float] = deque(maxlen=STEPS)
        self._found: dict[str, list[int]] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report a fault when enough steps agree on it."""
        if self._num_workers < 2:
            return ()
        gathered = step.gathered
        found = [self._check_applied(gathered)]
        if gathered.observed:
            norms_W = gathered.workers["grad_norm"].astype(np.float64)
            self._history.append(self._summary(step, norms_W))
            found += [
                self._check_ratio(gathered.step),
                self._check_pinned(gathered.step, norms_W),
            ]
        return [evidence for evidence in found if evidence is not None]

    def _summary(self, step: Step, norms_W: Floats) -> tuple[float, ...]:
        """Return the reduced and the expected norm, and the limit if all were clipped."""
        values = step.report.values
        reduced = float(values.get("grad_norm_reduced", math.nan))
        weighted = float(values.get("cosine_weighted", math.nan))
        mean = float(values.get("cosine_mean", math.nan))
        return (
            reduced,
            norm_of_mean(norms_W, weighted),
            clip_limit(reduced, mean, self._num_workers),
        )

    def _check_applied(self, gathered: GatheredStep) -> FaultEvidence | None:
        """Find gradients that are divided, or multiplied, by W once more after the reduction."""
        scales_W = gathered.workers["applied_scale"]
        width = self._num_workers
        first = float(scales_W[0])
        spread = float(scales_W.max()) - float(scales_W.min())
        common = spread <= _EXACT * abs(first) < math.inf  # false with NaN, or an infinity
        self._applied.append(first if common and not _undoes_scale(gathered, first) else math.nan)
        if len(self._applied) < STEPS_APPLIED:
            return None
        for factor, words in ((1 / width, "divided"), (width, "multiplied")):
            if all(abs(scale / factor - 1) < _EXACT for scale in self._applied):
                what = f"{words} once more by the number of workers"
                return self._evidence(
                    "sync.wrong_scale",
                    gathered.step,
                    factor=float(factor),
                    what=what,
                    window=STEPS_APPLIED,
                )
        return None

    def _check_ratio(self, step: int) -> FaultEvidence | None:
        if len(self._history) < STEPS or self._as_expected():
            return None
        history = np.array(self._history)
        usable = np.isfinite(history[:, :2]).all() and (history[:, :2] > 0).all()
        if not usable:
            return None
        reduced, expected, limits = history.T
        logs = np.log(reduced / expected)
        off = float(np.median(logs))
        spread = float(np.std(logs))
        wrong = abs(off) > APART and spread < STEADY
        factor = float(np.exp(off))
        if wrong and self._reading(factor):
            return self._evidence(
                "sync.wrong_scale", step, factor=factor, what=self._reading(factor)
            )
        late = np.log(reduced[1:] / expected[:-1])
        if _rms(late) < STEADY and _rms(logs) > 3 * max(_rms(late), STEADY / 2):
            return self._evidence("sync.stale", step)
        if not np.isfinite(limits).all():
            return None
        # Norms that change from step to step separate a limit from a factor: one explanation holds.
        limited = float(np.std(np.log(limits)))
        if off < -STEADY and limited < min(STEADY, spread / 2):
            return self._evidence("sync.clipped_locally", step, limit=float(np.median(limits)))
        if wrong and spread < limited / 2:
            return self._evidence("sync.wrong_scale", step, factor=factor, what="scaled")
        return None

    def _as_expected(self) -> bool:
        """Return whether each step's ratio is so close to 1 that nothing can be wrong."""
        return all(
            _LOW * expected <= reduced <= _HIGH * expected for reduced, expected, _ in self._history
        )

    def _check_pinned(self, step: int, norms_W: Floats) -> FaultEvidence | None:
        """Find local norms that stop at one value: most workers', in most steps."""
        largest = float(norms_W.max())
        pinned = False
        if 0 < largest < math.inf:
            at_limit = np.abs(norms_W - largest) <= _PINNED * largest
            pinned = 2 * int(np.count_nonzero(at_limit)) > len(norms_W)
        self._pinned.append(largest if pinned else math.nan)
        limits = [limit for limit in self._pinned if math.isfinite(limit)]
        if len(limits) < 3 * STEPS // 4 or max(limits) - min(limits) > _PINNED * limits[0]:
            return None
        if self._history[-1][1] > (1 - STEADY) * limits[0]:
            return None  # equal directions, too: the workers train on the same batches
        return self._evidence("sync.clipped_locally", step, limit=limits[0])

    def _reading(self, factor: float) -> str:
        """Return the usual mistake that gives a factor; empty if none does."""
        width = self._num_workers
        readings = {
            1 / width: "divided twice by the number of workers",
            float(width): "summed, not averaged",
        }
        for expected, words in readings.items():
            if abs(np.log(factor / expected)) < STEADY:
                return words
        return ""

    def _evidence(
        self,
        cause: str,
        step: int,
        *,
        factor: float = 1.0,
        what: str = "",
        limit: float = 0.0,
        window: int = STEPS,
    ) -> FaultEvidence:
        first, steps = self._found.setdefault(cause, [max(step - window + 1, 0), window - 1])
        self._found[cause][1] = steps + 1
        ranks = tuple(range(self._num_workers))
        error = cause != "sync.clipped_locally"
        return FaultEvidence(
            cause=cause,
            key=cause,
            severity=Severity.ERROR if error else Severity.WARNING,
            ranks=ranks,
            first_step=first,
            last_step=step,
            count=steps + 1,
            fields={
                "factor": f"{factor:.3g}",
                "what": what,
                "limit": f"{limit:.3g}",
                "steps": count(steps + 1, "observed step"),
            },
            numbers={"factor": factor, "limit": limit, "steps": steps + 1},
        )


def _undoes_scale(gathered: GatheredStep, applied: float) -> bool:
    """Return whether a factor after the reduction brings the loss's multiplier nearer to 1.

    A gradient scaler's ``unscale_`` divides there, and so does code that sums losses over
    micro-batches, such as a pipeline schedule, most of whose stages have no loss.
    """
    scale = common_scale(gathered)
    if math.isnan(scale):
        scale = float(gathered.workers["micro_batches"].min())  # negative where it is not known
    if not (scale > 0 and 0 < applied < math.inf):  # false with NaN
        return False
    return abs(math.log(scale) + math.log(applied)) < abs(math.log(scale))


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        ReductionChecks(run.num_workers),
        ReductionAudit(run.num_workers, run.reduced_in, hook=run.comm_hook, by_loop=run.by_loop),
        AccumulationAudit(),
        ChangedLater(other_axes=run.world_size > run.num_workers),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = ""
    if run.options.get("tier") == "scalars":
        impossible = "tier='scalars'"
    if run.options.get("reduced", "sketch") != "sketch":
        impossible = "no sketch of the reduction"
    return (Check("faults of the reduction", STEPS, impossible),)
