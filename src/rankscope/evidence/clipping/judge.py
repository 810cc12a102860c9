"""Two laws of clipping by the norm of all gradients.

- The factor is the same on all ranks, whether their gradients are shards or copies.
- Where the gradient is longer than the limit, its norm after clipping is the limit in every step.

A step counts where each rank scaled all gradients that were read by one factor: clipping by value,
by layer or by group, and added noise, have others. The norm after clipping is then the factor times
the norm of the reduced gradient, which counts every shard once. Shards on ranks that are not
compared only add to it.

Legend of shapes: W workers.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import known_values, name_values
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import LEAST_SCALER, Step, common_scale
from rankscope.bus.words import count
from rankscope.stats.arrays import MISSING_INT, Bools, Floats

BETWEEN = "clipped-between-micro-batches"

NEEDED = 3
"""Steps that have to break a law."""

STEPS = 16
"""Clipped steps from which a norm that is not announced can be judged."""

_STEADY = 8  # clipped steps whose norm is the same
_NEARLY = 0.1  # spread of the logarithm of a norm after clipping, over that before
_SLIGHT = 0.01  # a norm that is computed in bfloat16 errs by less
_EPSILON = 1e-6  # that implementations add to a norm


class FactorLaw(Detector):
    """Ranks that scale their shards by different factors after the reduction.

    Where all workers hold the same parameters, their digests show it.
    """

    def __init__(self) -> None:
        self._fault = PersistentFault(NEEDED)
        self._num_compared = 0
        self._words = ""
        self._own = False

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report factors that differ, and their end."""
        workers = step.gathered.workers
        replicas_W = workers["replica"]
        if replicas_W[0] != MISSING_INT and (replicas_W == replicas_W[0]).all():
            return ()
        known_W = _scaled_alike(step.gathered)
        if np.count_nonzero(known_W) < 2:
            return ()
        self._num_compared += 1
        scales_W = workers["applied_scale"]
        bound = 4 * float(workers["clip_rounding"][known_W].max())
        ranks = []
        if np.ptp(scales_W[known_W]) > bound * scales_W[known_W].max():
            typical = float(np.median(scales_W[known_W]))
            far_W = known_W & (np.abs(scales_W - typical) > bound * typical)
            odd_W = far_W if 2 * far_W.sum() < known_W.sum() else known_W
            ranks = np.flatnonzero(odd_W).tolist()
            apart = float(np.ptp(scales_W[known_W]) / scales_W[known_W].max())
            digits = max(3, 1 - math.floor(math.log10(apart)))  # so that the factors look different
            values = known_values(scales_W, known_W)
            self._words = name_values([None if v is None else f"{v:.{digits}g}" for v in values])
            clipped_W = known_W & (scales_W < 1 - bound)
            if np.count_nonzero(clipped_W) >= 2:
                after_W = (scales_W * workers["reduced_norm"])[clipped_W]
                self._own = bool(np.ptp(after_W) <= bound * after_W.max())
        return (self._evidence(),) if self._fault.observe(step.gathered.step, ranks) else ()

    def _evidence(self) -> FaultEvidence:
        fault = self._fault
        fields = {
            "factors": self._words,
            "shown": fault.count,
            "compared": count(self._num_compared, "step"),
            "own": " Each rank's factor fits the norm of its own shards." if self._own else "",
        }
        numbers = {
            "steps": fault.count,
            "steps_compared": self._num_compared,
            "by_own_norm": self._own,
        }
        return fault.evidence("sync.shard_factors", Severity.ERROR, fault.ranks, fields, numbers)


class ClippedBetween(Detector):
    """Gradients that are clipped after each micro-batch, and added to after that."""

    def __init__(self) -> None:
        self._fault = PersistentFault(NEEDED)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report clipping between its micro-batches, and its end."""
        workers = step.gathered.workers
        fault = self._fault
        ranks = np.flatnonzero(workers["clips_between"] > 0).tolist()
        if fault.observe(step.gathered.step, ranks):
            micro = int(workers["micro_batches"].max())
            numbers = {"steps": fault.count, "micro_batches": micro}
            fields = {"micro": micro}
            cause = "sync.accumulation"
            yield fault.evidence(cause, Severity.WARNING, fault.ranks, fields, numbers, key=BETWEEN)


class ClippedNothing(Detector):
    """Calls that should clip, and get no tensor that has a gradient."""

    def __init__(self) -> None:
        self._fault = PersistentFault(NEEDED)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report clipping that scales nothing, and its end."""
        workers = step.gathered.workers
        idle_W = (workers["clips_of_nothing"] > 0) & ~(
            workers["applied_scale"] < 1 - workers["clip_rounding"]
        )
        fault = self._fault
        if fault.observe(step.gathered.step, np.flatnonzero(idle_W).tolist()):
            cause = "sync.clip_norm"
            key = "clip-of-nothing"
            numbers = {"steps": fault.count}
            yield fault.evidence(cause, Severity.WARNING, fault.ranks, {}, numbers, key=key)


class NormLaw(Detector):
    """Norms after clipping that are not the limit, or not the same in every step.

    The limit is that of the training's call of torch, or the plan's. Without one, a norm that is
    nearly the same in all clipped steps is judged: where another combination of the ranks' norms is
    exactly the same, the training clips by that.
    """

    SETTINGS = ("_planned",)

    def __init__(self, planned: float | None) -> None:
        self._planned = planned
        self._fault = PersistentFault(NEEDED)
        self._nearly = PersistentFault()
        self._recent: deque[tuple[float, ...]] = deque(maxlen=STEPS)
        self._ratios: list[float] = []
        self._limit = math.nan
        self._called = False
        self._cause = ""

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report wrong norms, and their end."""
        gathered = step.gathered
        clipped = _Clipped.of(step, self._planned) if gathered.observed else None
        if clipped is None:
            return ()
        if clipped.acts:
            self._recent.append(clipped.norms)
        if math.isnan(clipped.limit):
            return self._judge_unannounced(gathered.step, clipped)
        wrong = self._is_wrong(clipped)
        if wrong:
            self._limit = clipped.limit
            self._called = clipped.called
            self._ratios = [*self._ratios, clipped.after / clipped.limit][-STEPS:]
            self._cause = clipped.guess or self._combination(clipped) or self._multiple(clipped)
        everyone = range(gathered.num_workers)
        shown = self._fault.observe(gathered.step, everyone if wrong else ())
        return (self._evidence(),) if shown else ()

    def _is_wrong(self, clipped: "_Clipped") -> bool:
        """Return whether the norm after clipping breaks the law."""
        if abs(clipped.after / clipped.limit - 1) <= clipped.bound:
            return False
        if self._spread(0, _STEADY) <= clipped.bound < self._spread(1, _STEADY):
            return clipped.acts  # one norm in every step, though not before: another limit
        over = clipped.after > clipped.limit
        return (over or clipped.factor < 1 - clipped.bound) and (
            clipped.certain or self._is_nearly_constant(clipped)
        )

    def _judge_unannounced(self, step: int, clipped: "_Clipped") -> Iterable[FaultEvidence]:
        """Judge a norm whose limit is not known."""
        if not clipped.acts or len(self._recent) < STEPS:
            return ()
        if not self._is_nearly_constant(clipped):
            return (self._nearly_evidence(),) if self._nearly.observe(step, ()) else ()
        self._cause = self._combination(clipped)
        self._nearly.see(step, before=STEPS - 1, first=step - STEPS + 1)
        return (self._nearly_evidence(),)

    def _is_nearly_constant(self, clipped: "_Clipped") -> bool:
        """Return whether the norm varies much less than before clipping, and more than rounding.

        A limit that follows the norms of earlier steps moves from step to step by less than in all.
        """
        if len(self._recent) < STEPS or self._spread(0, STEPS) <= 4 * clipped.bound:
            return False
        after_T, before_T = np.log(np.array(self._recent)[:, :2]).T
        moves = float(np.mean(np.diff(after_T) ** 2) / np.var(after_T))
        return bool(after_T.std() < _NEARLY * before_T.std() and moves > 1)

    def _spread(self, which: int, num_steps: int) -> float:
        """Return the relative spread of a norm over recent clipped steps; infinite with fewer."""
        if len(self._recent) < num_steps:
            return math.inf
        values = [norms[which] for norms in self._recent][-num_steps:]
        return max(values) / min(values) - 1

    def _combination(self, clipped: "_Clipped") -> str:
        """Return which other combination of the ranks' norms is constant after clipping."""
        if self._spread(0, _STEADY) <= 4 * clipped.bound:
            return ""
        found = (at for at in _COMBINATIONS if self._spread(at, _STEADY) <= clipped.bound)
        return next((f"the training clips by {_COMBINATIONS[at]}" for at in found), "")

    def _multiple(self, clipped: "_Clipped") -> str:
        """Return what it means that the square of a norm is a multiple or a part of the limit's."""
        squares = (clipped.limit / clipped.after) ** 2
        number = round(max(squares, 1 / squares))
        near = abs(max(squares, 1 / squares) / max(number, 1) - 1) <= 4 * clipped.bound
        if number < 2 or not near or self._spread(0, _STEADY) > clipped.bound:
            return ""
        if squares > 1:
            return f"as if every shard counted {number} times in the norm"
        return f"as if one shard in {number} counted in the norm"

    def _evidence(self) -> FaultEvidence:
        fault = self._fault
        ratios = [_ratio_words(min(self._ratios)), _ratio_words(max(self._ratios))]
        source = "" if self._called else " by the plan"
        slight = max(abs(ratio - 1) for ratio in self._ratios) < _SLIGHT
        return fault.evidence(
            "sync.clip_norm",
            Severity.NOTE if slight else Severity.WARNING,
            fault.ranks,
            {
                "limit": f"{self._limit:.4g}{source}",
                "ratios": " to ".join(dict.fromkeys(ratios)),
                "cause": f": {self._cause}" if self._cause else "",
            },
            {"steps": fault.count, "limit": self._limit, "ratio": self._ratios[-1]},
        )

    def _nearly_evidence(self) -> FaultEvidence:
        fault = self._nearly
        after_T, before_T = np.array(self._recent)[:, :2].T
        fields = {
            "norm": f"{after_T.mean():.3g}",
            "spread": f"{after_T.std() / after_T.mean():.2g}",
            "before": f"{before_T.std() / before_T.mean():.2g}",
            "cause": f": {self._cause}" if self._cause else "",
            "steps": count(fault.count, "clipped step"),
        }
        severity = Severity.WARNING if self._cause else Severity.NOTE
        numbers = {"steps": fault.count, "norm": float(after_T.mean())}
        return fault.evidence(
            "sync.clip_norm", severity, fault.ranks, fields, numbers, key="clip-norm-varies"
        )


class StageNorm(Detector):
    """A stage of a pipeline that clips by the norm of its own gradients.

    By the norm of all stages, what a stage has left is less than the limit, and another part of it
    in each step.
    """

    SETTINGS = ("_planned",)

    def __init__(self, planned: float | None) -> None:
        self._planned = planned
        self._fault = PersistentFault()
        self._own_steps: list[int] = []

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report where eight clipped steps in a row leave the limit."""
        gathered = step.gathered
        if not gathered.observed or not np.isfinite(gathered.workers["schedule_scale"]).all():
            return
        clipped = _Clipped.of(step, self._planned)
        if clipped is None or not clipped.acts or math.isnan(clipped.limit):
            return
        own = abs(clipped.after / clipped.limit - 1) <= clipped.bound
        self._own_steps = [*self._own_steps, gathered.step][-_STEADY:] if own else []
        if len(self._own_steps) == _STEADY:
            everyone = range(gathered.num_workers)
            self._fault.see(gathered.step, everyone, first=self._own_steps[0], before=_STEADY - 1)
            cause = "sync.clip_norm"
            key = "clip-norm-of-stage"
            fields = {"limit": f"{clipped.limit:.4g}"}
            numbers = {"steps": self._fault.count, "limit": clipped.limit}
            ranks = self._fault.ranks
            yield self._fault.evidence(cause, Severity.WARNING, ranks, fields, numbers, key=key)


_COMBINATIONS = {
    2: "the mean of the ranks' norms, where the root of the sum of their squares is meant",
    3: "the largest of the ranks' norms, where the root of the sum of their squares is meant",
    4: "the sum of the ranks' norms, where the root of the sum of their squares is meant",
}
"""Words for what :attr:`_Clipped.norms` holds, by its place there."""


class _Clipped:
    """The clipping of one step.

    ``limit`` is the norm that is meant, NaN if unknown; ``called`` whether a call of torch has it;
    ``certain`` whether it is one of the L2 norm; ``factor`` that of the call, NaN if unknown or if
    its norm counts other gradients, too. ``after`` is the norm after clipping, ``bound`` its
    relative error. ``acts`` whether the gradient was made shorter, ``guess`` what the call
    shows of the cause. ``norms`` are those after and before clipping, and combinations of the
    ranks' after it.
    """

    def __init__(self, step: Step, known_W: Bools, planned: float | None) -> None:
        workers = step.gathered.workers
        limit = _common(workers["clip_limit"])
        order = _common(workers["clip_order"])
        self.called = limit == limit
        self.limit = limit if self.called else planned or math.nan
        self.other_order = self.called and order == order and order != 2
        whole = bool(workers["clip_whole"].all())
        self.factor = _common(workers["clip_factor"]) if whole else math.nan
        scale = common_scale(step.gathered)
        scale = 1.0 if math.isnan(scale) else scale  # undone in all norms
        summed = float(workers["summed_workers"][0])
        unit = scale * (summed if summed > 0 else 1.0)  # recorded are norms of means
        applied = float(np.median(workers["applied_scale"][known_W]))
        before = float(step.report.values.get("grad_norm_reduced", math.nan)) * unit
        parts_W = workers["reduced_norm"] * unit
        self.after = applied * before
        rounding = float(workers["clip_rounding"].max())
        self.bound = 2 * rounding + (_EPSILON / self.limit if self.limit == self.limit else 0.0)
        own = self.factor if self.factor == self.factor else applied
        self.acts = own < 1 - self.bound
        near = 0.5 < self.after / self.limit < 2  # other norms of many elements are farther away
        self.certain = not self.called or order == 2 or near
        combined = (parts_W.mean(), parts_W.max(), parts_W.sum())
        self.norms = (self.after, before, *(applied * float(each) for each in combined))
        self.guess = ""
        left_out = int(workers["clip_left_out"][0])
        if scale >= LEAST_SCALER and abs(self.after * scale / self.limit - 1) <= 4 * self.bound:
            self.guess = "the training clips before it unscales"
        elif left_out != MISSING_INT and left_out > 0:
            are = "is" if left_out == 1 else "are"
            self.guess = f"{count(left_out, 'gradient')} that it scales {are} not part of the norm"

    @classmethod
    def of(cls, step: Step, planned: float | None) -> "_Clipped | None":
        """Return the clipping of a step; None where it has no single factor, or another norm."""
        gathered = step.gathered
        known_W = _scaled_alike(gathered)
        if not known_W.any():
            return None
        scales_W = gathered.workers["applied_scale"][known_W]
        rounding = float(gathered.workers["clip_rounding"].max())
        if not np.ptp(scales_W) <= 4 * rounding * scales_W.max():
            return None
        found = cls(step, known_W, planned)
        usable = 0 < found.after < math.inf and not found.other_order
        return found if usable and 0 < found.bound < 1 else None


def _scaled_alike(gathered: GatheredStep) -> Bools:
    """Return which workers are known to have scaled all gradients that were read by one factor."""
    workers = gathered.workers
    scales_W = workers["applied_scale"]
    alike_W = workers["applied_spread"] <= workers["clip_rounding"]  # false with NaN
    known_W: Bools = alike_W & np.isfinite(scales_W) & (scales_W > 0)
    return known_W


def _ratio_words(ratio: float) -> str:
    """Return a ratio with two digits of its distance from 1, three at least."""
    digits = max(3, 2 - math.floor(math.log10(abs(ratio - 1)))) if ratio != 1 else 3
    return f"{ratio:.{digits}g}"


def _common(values_W: Floats) -> float:
    """Return the value that all workers have; NaN if they differ."""
    first = float(values_W[0])
    return first if np.allclose(values_W, first, rtol=1e-6, atol=0.0) else math.nan


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    if run.plan.local_steps or run.by_loop:
        return ()
    planned = run.plan.max_norm
    laws = FactorLaw(), NormLaw(planned), StageNorm(planned)
    return *laws, ClippedBetween(), ClippedNothing()
