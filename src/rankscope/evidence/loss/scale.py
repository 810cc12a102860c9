"""The detector of losses with a wrong multiplier.

The multiplier of a loss is read where backward begins: accumulation divisor, gradient scaler and
any other factor together.
"""

import math
from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import LEAST_SCALER, Step
from rankscope.bus.words import count, name_ranks
from rankscope.stats.arrays import Floats, how_far
from rankscope.stats.state import Stateful
from rankscope.stats.tokens import TokenSums, are_alike, follow_tokens

ONE_WORKER = "loss-scale-one-worker"
"""Key of the finding of a worker whose multiplier differs from the others'."""

SHORT_WINDOW = "loss-scale-short-window"
"""Key of the finding of updates with fewer micro-batches than the loss was divided by."""

UNSCALED_TWICE = "loss-scale-unscaled-twice"
"""Key of the finding of gradients that are divided by a gradient scaler's factor twice."""

LONG_WINDOW = "loss-scale-long-window"
"""Key of the finding of updates with more micro-batches than the loss was divided by."""

_UNKNOWN = (
    " Nothing is wrong if the loss that rankscope sees is divided already, for instance by all "
    "workers' tokens."
)
_DIVIDED = (
    " The workers' tokens show that the loss is divided by their number already: this factor comes "
    "on top."
)

_SUM_IS_MEANT = "the sum over tokens is meant, whose gradient grows with their number"
_PART_IS_MEANT = (
    "each sequence is split over other ranks of the job (tensor, sequence or context parallelism), "
    "which divide by the whole"
)

_OF_MEANS = (
    " DDP and FSDP average over workers by themselves, so do not multiply or divide by their "
    "number; with accumulation, divide each loss by the number of micro-batches once."
)
_OF_WINDOWS = (
    " Where a Hugging Face Trainer calls a compute_loss of your own that takes num_items_in_batch, "
    "it divides by nothing: use that number there."
)
_OF_SUMS = (
    " Divide it by the label tokens of all workers before its backward pass, and multiply it by "
    "the number of workers where the wrapper averages over them."
)
_OF_WEIGHTS = (
    " Divide the gradients by the weights of all workers and micro-batches together, and multiply "
    "them by the number of workers where the wrapper averages over them."
)
_TOKENS = "the number of its label tokens"
_ALL_TOKENS = "the number of all workers' label tokens"
_OF_TOKENS = (_TOKENS, _ALL_TOKENS)
_BEFORE = " before backward"
_IN_SCHEDULE = " before backward and by the pipeline schedule after it"
_AND_LATER = " before backward and after the reduction, in the mean over workers"
_SCHEDULES = (
    " A pipeline schedule divides the gradients by its micro-batches; with scale_grads=False, the "
    "loss function has to."
)

_CLOSE = 1e-3
_STEPS = 8
_STEPS_OF_ONE = 3
_MANY_SHORT = 8
_OFTEN_SHORT = 0.25  # of all steps
_FEWEST_LONG = 2
_MOST_EARLY = 8
_POWERS = 3
_LARGEST = 1e300  # the sum over any number of workers is finite


_DECLARED = (
    "{micro} of the {declared} micro-batches that gradient_accumulation_steps declares, and by "
    "which each loss is divided"
)
_OF_DECLARED = (
    " Let each update have that many: with Accelerate, each batch is trained under "
    "accelerator.accumulate(model). Or declare as many as an update has."
)


class LossScale(Detector):
    """Multipliers that do not average to 1, and workers whose multiplier differs.

    Summed over a step's micro-batches and averaged over workers, the multipliers of a mean loss
    are 1, whether workers or tokens count alike. W, M, 1/W or 1/M (M micro-batches), or a product
    of two, in 8 steps in a row means that a factor is missing or there twice. So does one over a
    divisor of W, where losses are divided by all workers' tokens, as all counts prove; and the
    number of label tokens, the worker's or all: the training minimises their sum. That is a note,
    since it may be meant, and a warning where gradients are clipped. A factor that is undone after
    the reduction does not count.

    An update with fewer micro-batches than others, whose losses are divided by the number that the
    others have, counts less than these. That is a note, and a warning where it happens often. One
    with more micro-batches counts more: a warning, as the rest of an epoch stays in the gradient,
    unless windows vary in both directions.

    Losses of different weight, such as means times their label tokens, may be divided by the sum of
    the weights after the reduction. Then the weights of each step differ, and their mean times the
    later factor has to be 1; one of the numbers above in its place is a wrong factor.

    A gradient scaler multiplies, too, by a number that changes while it runs and hides any other
    factor. Three powers of two, or one from 1,024 on, count as one, unless it is the number of
    label tokens and is known to stay in the gradient. And losses that are sums over
    tokens, divided by the number on all workers, need the factor W.

    What counts is the factor that the optimizer gets. The division by a pipeline schedule after the
    backward passes is known. Any other factor is undone if the gradients are scaled after the
    reduction to those of a mean loss at most, or back to them: then a loop has divided them by
    hand, or they are clipped below both. A reduction that adds up the workers' gradients undoes
    one over W; where a loop reduces, only numbers of tokens are reported until it is known whether
    it does.

    Where the job has other ranks beside the workers, n for each of them, a factor of n or 1/n is a
    note: the workers may hold parts of sequences. Stages of a pipeline do not.

    Where the optimizer is unknown, and each micro-batch's backward pass synchronises, a step with
    1/W may be one of W steps, and is not reported.

    ``ranks_each``: the job's ranks for each worker, along other axes of its mesh; ``declared``: the
    number of micro-batches by which a framework divides each loss, 0 if unknown.
    """

    SETTINGS = ("_num_workers", "_ranks_each", "_by_loop", "_declared")

    def __init__(
        self, num_workers: int, ranks_each: int = 1, *, by_loop: bool = False, declared: int = 0
    ) -> None:
        self._num_workers = num_workers
        self._declared = declared
        self._ranks_each = ranks_each
        self._by_loop = by_loop
        self._sums = TokenSums()
        self._scaler = False
        self._powers: set[int] = set()
        self._most_micro = 1
        self._streak = ("", 0)
        self._streak_first = -1
        self._called = False  # the optimizer, in some step
        self._divided = False  # by all workers' tokens, which is proven
        self._span = PersistentFault()
        self._factor = ""
        self._value = math.nan
        self._applied = 1.0  # after the reduction, by the latest step that shows it
        self._summed = math.nan if by_loop else 1.0  # workers' gradients that are added up
        self._schedule = math.nan  # factor of a pipeline schedule after the backward passes
        self._later = False  # the value holds a factor after the reduction
        self._differing = _DifferingWorkers()
        self._windows = UnevenWindows()
        self._twice = PersistentFault(_STEPS, in_a_row=True)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's multipliers; report wrong ones."""
        gathered = step.gathered
        workers = gathered.workers
        self._sums.add_products(step.columns.token_products[step.index])
        scales_W = np.abs(workers["grad_scale"])
        known = scales_W.min() > 0 and scales_W.max() < _LARGEST  # false with NaN
        sizes = {len(micro) for micro in gathered.micro_losses}
        alike = known and (
            step.alike("grad_scale")
            or are_alike(scales_W)
            or follow_tokens(scales_W, workers["loss_weight"])
        )
        scale = _mean(step, scales_W) if alike and len(sizes) < 2 else math.nan
        self._called = self._called or bool((workers["optimizer_steps"] > 0).all())
        self._divided = bool(workers["loss_divided"].all())
        summed = float(workers["summed_workers"][0])
        self._summed = summed if summed > 0 else self._summed
        if not known or len(sizes) > 1:
            return
        micro = max(sizes, default=1)
        clipped_W = workers["clip_factor"]
        applied_W = workers["applied_scale"] / np.where(np.isfinite(clipped_W), clipped_W, 1.0)
        in_all = _of_weights(scales_W, applied_W)
        self._later = not math.isnan(in_all) and bool(self._factors(gathered, in_all, micro))
        if self._later:
            yield from self._observe_mean(gathered, in_all, micro)
            return
        if not alike:
            yield from self._differing.observe(gathered.step, scales_W)
            return
        if are_alike(applied_W):
            self._applied = float(applied_W[0])
        unseen = not np.isfinite(clipped_W).all()
        undone = _is_undone(scale, self._applied, may_be_clipped=unseen)
        is_sum = self._tokens(gathered) and are_alike(applied_W) and not undone
        if not is_sum:
            self._notice_scaler(scale, micro)
        if math.isnan(scale):
            return
        yield from self._observe_unscaling(gathered.step, scale, applied_W)
        whole = not workers["grad_carried_over"].any()  # else the update took more micro-batches
        if whole and not self._scaler and not self._sums.found:
            idle = int(workers["idle_passes"].max())
            yield from self._windows.observe(gathered.step, scale, micro, idle, self._num_workers)
        if step.alike("schedule_scale"):
            self._schedule = float(workers["schedule_scale"][0])
            scale *= self._schedule
        yield from self._observe_mean(gathered, 1.0 if undone else scale, micro)

    def _observe_unscaling(
        self, step: int, scale: float, applied_W: Floats
    ) -> Iterable[FaultEvidence]:
        twice = scale >= LEAST_SCALER and np.allclose(applied_W * scale**2, 1, rtol=_CLOSE)
        if self._twice.observe(step, range(self._num_workers) if twice else ()):
            over = "" if self._twice.open else " It is divided once again."
            fields = {"scale": f"{scale:,.10g}", "over": over}
            numbers = {"scale": scale, "steps": self._twice.count}
            ranks = range(self._num_workers)
            yield self._twice.evidence(
                "loss.scale", Severity.WARNING, ranks, fields, numbers, key=UNSCALED_TWICE
            )

    def _notice_scaler(self, scale: float, micro: int) -> None:
        if micro > self._most_micro:
            self._most_micro = micro
            self._powers.clear()
        power = math.log2(scale)
        if micro == self._most_micro and abs(power - round(power)) < 1e-6:
            self._powers.add(round(power))
        beyond = scale >= LEAST_SCALER and math.frexp(scale)[0] == 0.5
        self._scaler = self._scaler or beyond or len(self._powers) >= _POWERS

    def _observe_mean(
        self, gathered: GatheredStep, scale: float, micro: int
    ) -> Iterable[FaultEvidence]:
        counted = self._divided and not self._by_loop  # the multipliers are those of the sum then
        wanted = (1.0,) if counted else (1.0, self._summed)
        right = any(math.isclose(scale * by, 1, rel_tol=_CLOSE) for by in wanted)
        idle_W = gathered.workers["idle_passes"]
        thrown = bool((gathered.workers["grad_set_aside"] & (idle_W > 0)).all())  # see the audit
        silent = self._scaler or self._sums.found or right or thrown
        factor = ""
        if not silent and math.isnan(self._summed):
            factor = self._tokens(gathered)
        elif not (silent or (micro == 1 and scale < 1 and not self._called)):
            factor = " or ".join(self._factors(gathered, scale, micro)) or self._tokens(gathered)
        before, steps = self._streak
        self._streak = factor, (steps + 1 if factor == before else 1)
        if self._streak[1] == 1:
            self._streak_first = gathered.step
        if not factor or self._streak[1] < _STEPS:
            return ()
        if factor != self._factor:
            self._span = PersistentFault()
        self._span.see(gathered.step, first=self._streak_first, before=_STEPS - 1)
        self._factor = factor
        self._value = scale
        clips = not np.isnan(gathered.workers["clip_limit"]).all()
        meant = _SUM_IS_MEANT if factor in _OF_TOKENS and not clips else ""
        parts = (self._ranks_each, 1 / self._ranks_each) if math.isnan(self._schedule) else ()
        if any(part != 1 and math.isclose(scale, part, rel_tol=_CLOSE) for part in parts):
            meant = _PART_IS_MEANT
        return (self._evidence(micro, meant),)

    def _factors(self, gathered: GatheredStep, scale: float, micro: int) -> list[str]:
        """Return the names of a number of workers or micro-batches, or of one over it."""
        factors = {
            "the number of workers": self._num_workers,
            "the number of micro-batches": micro,
            "one over the number of workers": 1 / self._num_workers,
            "one over the number of micro-batches": 1 / micro,
            "the number of workers times that of micro-batches": self._num_workers * micro,
            "one over the number of workers and that of micro-batches": 1
            / (self._num_workers * micro),
        }
        if micro == 1 or self._num_workers == 1:  # the products are the single ones
            factors = dict(list(factors.items())[:4])
        if self._declared not in (0, micro):
            factors[_DECLARED.format(declared=self._declared, micro=micro)] = micro / self._declared
        workers = gathered.workers
        if self._divided and not are_alike(workers["loss_weight"]):
            factors |= {
                f"one over {size}, as if {size} workers were one": 1 / size
                for size in range(2, self._num_workers)
                if self._num_workers % size == 0
            }
        return [
            name
            for name, factor in factors.items()
            if factor != 1 and math.isclose(scale, factor, rel_tol=_CLOSE)
        ]

    def _tokens(self, gathered: GatheredStep) -> str:
        """Return which number of label tokens the multipliers are; empty if they are none."""
        scales_W = gathered.workers["grad_scale"]
        tokens_W = gathered.workers["loss_weight"]
        for name, times in ((_TOKENS, 1), (_ALL_TOKENS, self._num_workers)):
            if tokens_W.max() > 1 and np.allclose(scales_W, times * tokens_W, rtol=_CLOSE):
                return name
        return ""

    def _evidence(self, micro: int, meant: str) -> FaultEvidence:
        advice = _OF_SUMS if self._factor in _OF_TOKENS else _OF_MEANS
        if "gradient_accumulation_steps" in self._factor:
            advice = _OF_DECLARED
        advice += _OF_WINDOWS if round(self._value, 2) == micro > 1 else ""
        where = _IN_SCHEDULE if abs(self._schedule - 1) > _CLOSE else _BEFORE
        if self._later:
            advice = _OF_WEIGHTS
            where = _AND_LATER
        return self._span.evidence(
            "loss.scale",
            Severity.NOTE if meant else Severity.WARNING,
            range(self._num_workers),
            {
                "value": f"{self._value:.4g}",
                "factor": self._factor,
                "meant": meant,
                "advice": advice,
                "divided": ("" if math.isnan(self._schedule) else _SCHEDULES)
                + (_DIVIDED if self._divided else _UNKNOWN),
                "where": where,
                "workers": self._num_workers,
                "micro": count(micro, "micro-batch", "micro-batches"),
            },
            {"multiplier": self._value, "micro_batches": micro, "steps": self._span.count},
        )


def _is_undone(scale: float, applied: float, *, may_be_clipped: bool = False) -> bool:
    """Return whether a factor after the reduction, known clipping apart, undoes that of the loss.

    ``may_be_clipped``: also where less is left than a mean loss would give.

    >>> _is_undone(4.0, 0.25), _is_undone(4.0, 0.1), _is_undone(0.25, 4.0)
    (True, False, True)
    >>> _is_undone(4.0, 0.1, may_be_clipped=True), _is_undone(4.0, 0.5, may_be_clipped=True)
    (True, False)
    """
    if math.isclose(scale * applied, 1, rel_tol=_CLOSE):
        return True
    return may_be_clipped and scale > 1 + _CLOSE and scale * applied < 1


def _of_weights(scales_W: Floats, applied_W: Floats) -> float:
    """Return what the mean of different weights is after a later division; NaN without one.

    >>> _of_weights(np.array([30.0, 10.0]), np.array([0.05, 0.05]))
    1.0
    """
    later = float(applied_W[0])
    if are_alike(scales_W) or not are_alike(applied_W) or math.isclose(later, 1, rel_tol=_CLOSE):
        return math.nan
    return float(scales_W.mean()) * later


def _mean(step: Step, scales_W: Floats) -> float:
    if step.alike("grad_scale") and math.frexp(scales_W[0])[0] == 0.5:
        return float(scales_W[0])  # sums of a power of two are exact
    return float(scales_W.mean())


class UnevenWindows(Stateful):
    """Updates with other numbers of micro-batches, whose losses are divided by one number.

    Where forward passes without a backward pass fill a window, the training has left these out.
    The first windows are judged once a full one has shown the number: a job that continues from a
    checkpoint inside a window, whose gradients are lost, begins with the rest of it.
    """

    def __init__(self) -> None:
        self._full = 0  # micro-batches of the longest window, whose multipliers add up to 1
        self._num_steps = 0
        self._early: list[tuple[int, float, int, int]] = []  # windows before a full one
        self._short = PersistentFault()
        self._long = PersistentFault()

    def observe(
        self, step: int, scale: float, micro: int, idle: int, num_workers: int
    ) -> Iterable[FaultEvidence]:
        """Process the sum of a step's multipliers, and its number of passes with a gradient."""
        self._num_steps += 1
        self._early.append((step, scale, micro, idle))
        if math.isclose(scale, 1, rel_tol=_CLOSE):
            self._full = max(self._full, micro)
        if not self._full:
            del self._early[_MOST_EARLY:]
            return
        windows, self._early = self._early, []
        for window in windows:
            yield from self._judge(*window, num_workers)

    def _judge(
        self, step: int, scale: float, micro: int, idle: int, num_workers: int
    ) -> Iterable[FaultEvidence]:
        """Judge a window, given the number of micro-batches of a full one."""
        uneven = micro != self._full and micro + max(idle, 0) != self._full
        if not (uneven and math.isclose(scale * self._full, micro, rel_tol=_CLOSE)):
            return
        is_short = micro < self._full
        span = self._short if is_short else self._long
        span.see(step)
        often = span.count >= max(_MANY_SHORT, _OFTEN_SHORT * self._num_steps)
        if not is_short and span.count < _FEWEST_LONG:
            return
        serious = often if is_short else not self._short.count  # else windows vary on purpose
        yield span.evidence(
            "loss.scale",
            Severity.WARNING if serious else Severity.NOTE,
            range(num_workers),
            {
                "micro": count(micro, "micro-batch", "micro-batches"),
                "full": self._full,
                "ratio": f"{scale:.4g}",
            },
            {"micro_batches": micro, "of": self._full, "steps": span.count},
            key=SHORT_WINDOW if is_short else LONG_WINDOW,
        )


class _DifferingWorkers(Stateful):
    """Workers whose multiplier is a constant times the others'."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, int, int]] = {}
        self._ranks: set[int] = set()
        self._span = PersistentFault()

    def observe(self, step: int, scales_W: Floats) -> Iterable[FaultEvidence]:
        """Process a step's multipliers, which differ."""
        ratio_W = _against_most(scales_W)
        if ratio_W is None:
            return ()
        differing = np.flatnonzero(np.abs(ratio_W - 1) > _CLOSE).tolist()
        for rank in differing:
            ratio, steps, first = self._seen.get(rank, (0.0, 0, step))
            same = math.isclose(ratio, ratio_W[rank], rel_tol=_CLOSE)
            self._seen[rank] = (
                (ratio, steps + 1, first) if same else (float(ratio_W[rank]), 1, step)
            )
        certain = {rank for rank in differing if self._seen[rank][1] >= _STEPS_OF_ONE}
        if not certain:
            return ()
        first = min(self._seen[rank][2] for rank in certain)
        self._span.see(step, first=first, before=_STEPS_OF_ONE - 1)
        self._ranks |= certain
        return (self._evidence(len(scales_W)),)

    def _evidence(self, num_workers: int) -> FaultEvidence:
        differing = sorted(self._ranks)
        ranks = tuple(differing) if num_workers > 2 else (0, 1)
        ratios = {rank: self._seen[rank][0] for rank in differing}
        farthest = max(ratios, key=lambda rank: how_far(ratios[rank]))
        alike = all(
            math.isclose(each, ratios[farthest], rel_tol=_CLOSE) for each in ratios.values()
        )
        which = "" if alike else f" on rank {farthest}, the farthest of {len(ratios)} workers"
        return self._span.evidence(
            "loss.scale",
            Severity.WARNING,
            ranks,
            {
                "who": name_ranks(differing),
                "others": ("the others'" if num_workers > 2 else "rank 0's") + which,
                "ratio": f"{ratios[farthest]:.4g}",
            },
            {
                "ratios": {str(rank): ratio for rank, ratio in list(ratios.items())[:16]},
                "steps": self._span.count,
            },
            key=ONE_WORKER,
        )


def _against_most(scales_W: Floats) -> Floats | None:
    """Return multipliers over that of most ``[W]``, of two over rank 0's; None: no majority."""
    reference = float(np.median(scales_W)) if len(scales_W) > 2 else float(scales_W[0])
    ratio_W: Floats = scales_W / reference
    most = 2 * int(np.sum(np.abs(ratio_W - 1) <= _CLOSE)) > len(scales_W)
    return ratio_W if most or len(scales_W) == 2 else None
