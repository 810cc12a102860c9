"""The detectors of losses: weighting, scale, values that are not finite, no gradient.

Means of means do not weigh label tokens alike. A mean over the tokens of each worker, averaged over
workers, gives a token on a worker with few of them more weight than one on a worker with many. The
same happens between micro-batches.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import (
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
)
from rankscope.bus.finding import Severity
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step, common_scale
from rankscope.bus.words import count, name_ranks, named, shortened
from rankscope.evidence.loss.scale import LossScale
from rankscope.stats.arrays import MISSING_INT, Floats, Ints
from rankscope.stats.tokens import TokenSums, are_alike, as_matrix, log_spread

_SKIPS_IN_A_ROW = 20
_ZERO_IN_A_ROW = 8
_WITHOUT = 16  # measured steps
_NAMED = 4

PARTS = "parts-without-gradient"
"""Key of the finding of parameters that never had a gradient, while others have."""


class NonFinite(Detector):
    """Infinities and NaN in local losses and gradients.

    It is an error where the optimizer was called all the same, or may have been. A gradient scaler
    overflows now and then on purpose, and the optimizer skips that step: then a bad loss is a
    warning, and so are very many skipped steps although the scale has fallen to 1. So is a step
    whose reduced gradient is finite: the training has dropped what was not. After an update with
    them, all workers have them: ranks that are new by then follow, and are not to blame.
    """

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self._followers: set[int] = set()
        self._span = PersistentFault()
        self._severity = Severity.NOTE
        self._applied = False
        self._dropped = False  # an update was made without them
        self._without_labels = 0  # steps in which the batches of all that had them had no label
        self._skips_in_a_row = 0

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report NaN and infinite values."""
        gathered = step.gathered
        if not step.some_true("nonfinite"):
            self._skips_in_a_row = 0
            return ()
        ranks = np.flatnonzero(gathered.workers["nonfinite"])
        self._span.see(gathered.step)
        in_loss = _has_bad_loss(gathered, ranks)
        for rank in ranks.tolist():
            if self._applied and rank not in self._seen:
                self._followers.add(rank)
            else:
                self._seen[rank] = "loss" if in_loss else self._seen.get(rank, "gradient")
        if (gathered.workers["loss_weight"][ranks] == 0).all():
            self._without_labels += 1
        # whether the optimizer is known to have got a finite gradient all the same
        dropped = bool(np.isfinite(gathered.workers["reduced_norm"]).all())
        if not gathered.observed and not self._applied:
            dropped |= self._dropped  # NaN in the parameters would show in the next observed step
        calls_W = gathered.workers["optimizer_steps"]
        skipped = None if (calls_W == MISSING_INT).any() else not calls_W.any()
        self._dropped |= dropped and not skipped
        skipped = dropped or skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        self._applied = self._applied or skipped is False
        stuck = self._skips_in_a_row >= _SKIPS_IN_A_ROW and not common_scale(gathered) > 1
        severity = Severity.WARNING if in_loss or stuck else Severity.NOTE
        self._severity = max(self._severity, severity if skipped else Severity.ERROR)
        return (self._evidence(),)

    def _evidence(self) -> FaultEvidence:
        what = "loss" if "loss" in self._seen.values() else "gradient"
        applied = ", and the optimizer went on" if self._applied else ""
        if self._followers:
            applied += f"; {name_ranks(self._followers)} followed"
        outcome = "the optimizer skipped every such step: the parameters are as they were"
        if self._dropped:
            outcome = (
                "the reduced gradient was finite in every step that the optimizer took: they did "
                "not reach the parameters"
            )
        labels = check = ""
        if self._without_labels:
            steps = count(self._without_labels, "step")
            labels = f" In {steps}, the batches had no label token: a mean over none is NaN."
            check = (
                "Look for what masks or cuts off all labels of a batch, as a short length does. "
            )
        fields = {"what": what, "applied": applied, "outcome": outcome, "labels": labels}
        fields["label_check"] = check
        numbers = {"steps": self._span.count, "in": what}
        return self._span.evidence(
            "numerics.nonfinite", self._severity, self._seen, fields, numbers
        )


class NoGradient(Detector):
    """Local gradients that are zero in every element, on all workers, in eight steps in a row."""

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._zero = PersistentFault(_ZERO_IN_A_ROW, in_a_row=True)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report missing gradients, and the end of that."""
        ends = step.ends("grad_norm")
        if np.isnan(ends).any():
            return ()
        zero = self._zero
        if not zero.observe(step.gathered.step, range(self._num_workers) if ends == (0, 0) else ()):
            return ()
        numbers = {"steps": zero.count}
        return (zero.evidence("loss.no_gradient", Severity.WARNING, zero.ranks, {}, numbers),)


class PartsWithoutGradient(Detector):
    """Groups of trained parameters whose gradient was zero on all workers in each measured step.

    A warning where they are half of the groups or more, else a note: a head may not be in use.
    """

    def __init__(self) -> None:
        self._without: list[str] | None = None
        self._steps = 0
        self._first = 0
        self._num_groups = 0
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report groups without a gradient, and those that get one later."""
        norms_WG = step.gathered.group_norms_WG
        if norms_WG is None or not norms_WG.any() or not np.isfinite(norms_WG).all():
            return ()
        groups = step.gathered.groups
        idle_G = np.abs(norms_WG).max(axis=0) == 0
        zero = {name for name, idle in zip(groups, idle_G, strict=True) if idle}
        before = groups if self._without is None else self._without
        still = [name for name in before if name in zero]
        if not self._steps:
            self._first = step.gathered.step
        self._steps += 1
        self._num_groups = len(groups)
        changed = self._steps == _WITHOUT or self._without != still
        self._without = still or (self._without if self._span.open else still)
        if self._steps < _WITHOUT or not changed or not (still or self._span.open):
            return ()
        if still:
            self._span.see(step.gathered.step, first=self._first, before=self._steps - 1)
        else:
            self._span.close()
        return (self._evidence(),)

    def _evidence(self) -> FaultEvidence:
        names = self._without or []
        most = 2 * len(names) >= self._num_groups
        fields = {
            "names": shortened(names, _NAMED),
            "of": f"{len(names)} of {count(self._num_groups, 'group')}",
            "over": "" if self._span.open else " They get one now.",
        }
        severity = Severity.WARNING if most else Severity.NOTE
        return self._span.evidence(
            "loss.no_gradient", severity, (), fields, named(names), key=PARTS
        )


def _has_bad_loss(gathered: GatheredStep, ranks: Ints) -> bool:
    """Return whether these ranks' losses are not finite; without any, tokens or gradient show."""
    workers = gathered.workers
    losses_W = workers["loss"]
    measured = np.isfinite(losses_W).any() or np.isinf(losses_W).any()
    measured |= np.isfinite(workers["grad_norm"][ranks]).any()
    measured |= (workers["loss_weight"][ranks] == 0).any()
    return bool(measured and not np.isfinite(losses_W[ranks]).all())


MICRO = "token-weighting-micro-batches"
STARVED = "token-weighting-one-worker"
"""Keys of the findings between micro-batches, and of one worker with very few tokens."""

LEAST_STEPS = 16
WARNING = 2.0
NOTE = 1.25
"""Largest over smallest weight of a token in a step, in the geometric mean over steps."""

_WINDOW = 64
_FEW = 8
_FEW_STEPS = 8


class TokenWeighting(Detector):
    """Label tokens against how the loss is weighted.

    Judges steps in which all multipliers are equal though token counts differ. Multipliers that
    follow the token counts weigh all tokens alike; so do losses that are sums over tokens divided
    by one number for all (:class:`rankscope.stats.tokens.TokenSums`). Over the last 64 such
    steps, and at least 16, the geometric mean of the ratio between the largest and the smallest
    weight of a token decides. One step with a short batch does not move it.

    A worker with at most an eighth of the typical worker's tokens in 8 steps is named sooner; a
    step in which it has more takes back one in which it had fewer.

    ``weighting``: the intended weighting: ``"worker"`` when all workers count alike whatever their
    tokens, ``"token"`` when all tokens do, None if unknown.
    """

    SETTINGS = ("_intended",)

    def __init__(self, num_workers: int, weighting: str | None = None) -> None:
        self._intended = weighting == "worker"
        self._between = _Spread()
        self._inside = _Spread()
        self._starved = _Starved(num_workers)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's token counts; report weights that differ."""
        if not self._intended:
            self._between.sums.add_products(step.columns.token_products[step.index])
            yield from self._observe_workers(step)
            yield from self._observe_micro_batches(step.gathered)

    def _observe_workers(self, step: Step) -> Iterable[FaultEvidence]:
        number = step.gathered.step
        scales_W = step.gathered.workers["grad_scale"]
        tokens_W = step.gathered.workers["loss_weight"]
        if self._between.sums.found:
            return
        if self._starved.add(number, scales_W, tokens_W):
            yield self._starved.describe()
        if self._starved.ranks:
            tokens_W = tokens_W.copy()
            tokens_W[list(self._starved.ranks)] = np.nan
            spread = float(log_spread(scales_W[None], tokens_W[None])[0])
        else:
            spread = step.columns.token_spreads[step.index]
        if self._between.add(number, spread):
            ranks = np.flatnonzero(np.isfinite(scales_W + tokens_W)).tolist()
            yield self._between.describe("", ranks)

    def _observe_micro_batches(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        if not gathered.micro_scales:
            return
        scales_WM, tokens_WM, losses_WM = map(
            as_matrix, (gathered.micro_scales, gathered.micro_weights, gathered.micro_losses)
        )
        self._inside.sums.add(losses_WM, tokens_WM)
        spread_W = log_spread(scales_WM, tokens_WM)
        known_W = np.isfinite(spread_W)
        if self._inside.sums.found or not known_W.any():
            return
        if self._inside.add(gathered.step, float(spread_W[known_W].mean())):
            yield self._inside.describe(MICRO, np.flatnonzero(known_W).tolist())


class _Spread(PersistentFault):
    """Follows by how much the weights of tokens differ inside the latest steps."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = TokenSums()
        self._latest: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._ratio = 1.0
        self._largest = 1.0

    def add(self, step: int, log_ratio: float) -> bool:
        """Add a step, NaN when it cannot be judged; return whether the evidence has changed."""
        if not math.isfinite(log_ratio):
            return False
        self._latest.append((step, log_ratio))
        if len(self._latest) < LEAST_STEPS or log_ratio < math.log(NOTE):
            return False
        ratio = math.exp(sum(one for _, one in self._latest) / len(self._latest))
        if ratio < NOTE:
            return False
        if not self.count:
            self._largest = math.exp(max(one for _, one in self._latest))
        shown = [at for at, one in self._latest if one >= math.log(NOTE)]
        self.see(step, first=shown[0], before=len(shown) - 1)
        self._ratio = max(self._ratio, ratio)
        self._largest = max(self._largest, math.exp(log_ratio))
        return True

    def describe(self, key: str, ranks: Iterable[int]) -> FaultEvidence:
        """Return the evidence so far."""
        return self.evidence(
            "loss.token_weighting",
            Severity.WARNING if self._ratio >= WARNING else Severity.NOTE,
            ranks,
            {"ratio": f"{self._ratio:.2g}", "largest": f"{self._largest:.2g}"},
            {
                "token_weight_ratio": self._ratio,
                "token_weight_ratio_largest": self._largest,
                "steps": self.count,
            },
            key=key,
        )


class _Starved(PersistentFault):
    """Workers that have hardly any label tokens, step after step, and count like the others."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self._score_W = np.zeros(num_workers, np.int64)
        self._since_W = np.zeros(num_workers, np.int64)
        self._tokens = self._typical = math.nan

    def add(self, step: int, scales_W: Floats, tokens_W: Floats) -> bool:
        """Add a step; return whether it adds evidence."""
        if float(tokens_W.min()) > float(tokens_W.max()) / _FEW and not self._score_W.any():
            return False  # nobody has few
        known_W = np.isfinite(scales_W) & np.isfinite(tokens_W)
        if known_W.sum() < 2 or not are_alike(scales_W[known_W]):
            return False
        typical = float(np.median(tokens_W[known_W]))
        few_W = known_W & (tokens_W <= typical / _FEW) & (typical > 0)
        self._since_W[few_W & (self._score_W == 0)] = step
        self._score_W = np.maximum(self._score_W + np.where(few_W, 1, -1), 0)
        self.ranks |= set(np.flatnonzero(self._score_W >= _FEW_STEPS).tolist())
        named_W = few_W & np.isin(np.arange(len(few_W)), list(self.ranks))
        if not named_W.any():
            return False
        self.see(step, first=int(self._since_W[named_W].min()), before=_FEW_STEPS - 1)
        self._tokens = float(tokens_W[named_W].max())
        self._typical = typical
        return True

    def describe(self) -> FaultEvidence:
        """Return the evidence so far."""
        return self.evidence(
            "loss.token_weighting",
            Severity.WARNING,
            self.ranks,
            {
                "have": "have" if len(self.ranks) > 1 else "has",
                "tokens": count(round(self._tokens), "label token"),
                "typical": f"{self._typical:,.0f}",
            },
            {
                "label_tokens": self._tokens,
                "label_tokens_typical": self._typical,
                "steps": self.count,
                "other_causes": ["data.worker_outlier"],
            },
            key=STARVED,
        )


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        NonFinite(),
        NoGradient(run.num_workers),
        PartsWithoutGradient(),
        TokenWeighting(run.num_workers, run.plan.loss_weighting),
        LossKinds(run.num_workers),
        LossScale(
            run.num_workers,
            max(run.world_size // run.num_workers, 1),
            by_loop=run.by_loop,
            declared=run.declared_micro_batches,
        ),
    )


OTHER_KIND = "loss-of-another-kind"
_STEPS_OF_KIND = 24


class LossKinds(Detector):
    """Workers whose label tokens are unknown while others' are known, in 24 steps in a row.

    Autograd shows over how many tokens a loss is taken where its operators are known: another
    option of the loss on some ranks, such as label smoothing, hides it there.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._span = PersistentFault(_STEPS_OF_KIND, in_a_row=True)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report workers with another kind of loss, and their end."""
        workers = step.gathered.workers
        odd = np.flatnonzero(np.isnan(workers["loss_weight"])).tolist()
        comparable = 2 * len(odd) <= self._num_workers and np.isfinite(workers["loss"]).all()
        if not self._span.observe(step.gathered.step, odd if comparable else ()):
            return ()
        severity = self._span.severity(self._num_workers)
        over = "" if self._span.open else " They are alike again."
        numbers = {"steps": self._span.count}
        return (
            self._span.evidence(
                "loss.scale", severity, self._span.ranks, {"over": over}, numbers, key=OTHER_KIND
            ),
        )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    return (
        Check("values that are not finite", 1),
        Check("the weights of workers in the average", LEAST_STEPS),
    )
