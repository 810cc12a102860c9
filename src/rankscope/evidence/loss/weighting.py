"""The detector of label tokens that do not weigh alike: means of means.

A mean over the tokens of each worker, averaged over workers, gives a token on a worker with few of
them more weight than one on a worker with many. The same happens between micro-batches.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.weighting import TokenSums, are_alike, as_matrix, log_spread
from rankscope.bus.words import count
from rankscope.stats.arrays import Floats

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
    by one number for all (:class:`rankscope.bus.weighting.TokenSums`). Over the last 64 such
    steps, and at least 16, the geometric mean of the ratio between the largest and the smallest
    weight of a token decides. One step with a short batch does not move it.

    A worker with at most an eighth of the typical worker's tokens in 8 steps is named sooner; a
    step in which it has more takes back one in which it had fewer.

    Args:
        num_workers: W.
        weighting: The intended weighting: ``"worker"`` when all workers count alike whatever
            their tokens, ``"token"`` when all tokens do, None if unknown.
    """

    SETTINGS = ("_intended",)

    def __init__(self, num_workers: int, weighting: str | None = None) -> None:
        self._intended = weighting == "worker"
        self._between = _Spread()
        self._inside = _Spread()
        self._starved = _Starved(num_workers)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step's token counts; report weights that differ."""
        if self._intended:
            return ()
        gathered = step.gathered
        self._between.sums.add_products(step.columns.token_products[step.index])
        return (*self._observe_workers(step), *self._observe_micro_batches(gathered))

    def _observe_workers(self, step: Step) -> Iterable[FaultEvidence]:
        gathered = step.gathered
        workers = step.gathered.workers
        scales_W = workers["grad_scale"]
        tokens_W = workers["loss_weight"]
        found: list[FaultEvidence] = []
        if self._between.sums.found:
            return found
        if self._starved.add(gathered.step, scales_W, tokens_W):
            found.append(self._starved.describe())
        if self._starved.ranks:
            tokens_W = tokens_W.copy()
            tokens_W[list(self._starved.ranks)] = np.nan
            spread = float(log_spread(scales_W[None], tokens_W[None])[0])
        else:
            spread = step.columns.token_spreads[step.index]
        if self._between.add(gathered.step, spread):
            ranks = tuple(np.flatnonzero(np.isfinite(scales_W + tokens_W)).tolist())
            found.append(self._between.describe("", ranks))
        return found

    def _observe_micro_batches(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        if not gathered.micro_scales:
            return ()
        scales_WM, tokens_WM, losses_WM = map(
            as_matrix, (gathered.micro_scales, gathered.micro_weights, gathered.micro_losses)
        )
        self._inside.sums.add(losses_WM, tokens_WM)
        spread_W = log_spread(scales_WM, tokens_WM)
        known_W = np.isfinite(spread_W)
        if self._inside.sums.found or not known_W.any():
            return ()
        if not self._inside.add(gathered.step, float(spread_W[known_W].mean())):
            return ()
        return (self._inside.describe(MICRO, tuple(np.flatnonzero(known_W).tolist())),)


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
