"""Directional derivatives, judged: is the given gradient that of the loss?

Of each block of parameters, the changes of the loss by moves of two lengths yield the change that
is linear in the move, by Richardson's extrapolation, and its error. The gradient that the optimizer
was given foretells the same change.

Legend of shapes: B blocks of parameters, D directions (the gradient's, random signs), E lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from rankscope.bus.shares import Packable
from rankscope.stats.arrays import Floats, median

LENGTHS = (1.0, 2.0)
"""Lengths of the moves, over the shorter one."""

_UNCLEAR = 0.1  # relative error beyond which a change shows nothing
_UNCLEAR_SIGNS = 0.25  # the same along random signs, over the usual change
_SAME = 3e-3  # relative: quotients this close are the same
_SAME_SIGNS = 0.015  # of the usual change
_COARSER = 8.0  # times as far in 16-bit types
_SURE = 4.0  # errors
_AVERAGED = 32.0  # a loss rounds less than a 16-bit type, being a mean


@dataclass(frozen=True, slots=True)
class Slopes(Packable):
    """Directional derivatives of one step, by block."""

    labels: tuple[str, ...]  # what the blocks are called ``[B]``
    changes_BDE: Floats  # half the difference of the mean loss between both ends of a move
    given_BDE: Floats  # the same by the given gradient
    usual_BD: Floats  # its usual size
    loss: float  # mean loss of the ranks
    error: float  # largest difference of a rank's loss between two runs
    scale: float  # of what backward was called on: summed over micro-batches, mean over ranks
    rounds_in: float  # epsilon of the coarsest type of the forward pass
    num_ranks: int
    parts: bool  # the ranks of one worker have different losses
    clipped: float  # factor of all gradients since the reduction; NaN if unknown

    def refined(
        self,
        places: Sequence[int],
        labels: Sequence[str],
        changes_BDE: Floats,
        given_BDE: Floats,
        usual_BD: Floats,
    ) -> "Slopes":
        """Return the same with finer blocks in place of some."""
        rest = [at for at in range(len(self.labels)) if at not in places]
        return replace(
            self,
            labels=(*(self.labels[at] for at in rest), *labels),
            changes_BDE=np.concatenate([self.changes_BDE[rest], changes_BDE]),
            given_BDE=np.concatenate([self.given_BDE[rest], given_BDE]),
            usual_BD=np.concatenate([self.usual_BD[rest], usual_BD]),
        )

    @property
    def fits(self) -> bool:
        """Whether the shapes of the arrays fit each other."""
        shape = (len(self.labels), 2, len(LENGTHS))
        return (
            self.changes_BDE.shape
            == self.given_BDE.shape
            == shape
            == (*self.usual_BD.shape, len(LENGTHS))
        )


class SlopeAnswer(StrEnum):
    """How the given gradient compares with the derivative of the loss."""

    AGREES = "agrees"
    FACTOR = "factor"
    """All of it has one factor."""
    BLOCKS = "blocks"
    """Some blocks differ."""
    UNCLEAR = "unclear"
    """Rounding, or jumps of the loss, hide it."""


@dataclass(frozen=True, slots=True)
class BlockSlope:
    """One block's gradient over the derivative of the loss."""

    label: str  # what its parameters are called
    ratio: float  # quotient; NaN if it is unclear
    bound: float
    lacks: bool  # it is no multiple: a part is missing, or too much

    @property
    def several(self) -> bool:
        """Whether it has several parameters: not each of them may differ."""
        return self.label.endswith(" more)")


@dataclass(frozen=True, slots=True)
class SlopeVerdict:
    """The result."""

    answer: SlopeAnswer
    factor: float  # the gradient over the derivative, for most blocks
    blocks: tuple[BlockSlope, ...]
    odd_places: tuple[int, ...] = ()  # the numbers of blocks that differ from that
    summed: bool = False  # the losses of a worker's ranks are added up

    @property
    def odd(self) -> tuple[BlockSlope, ...]:
        """The blocks that differ."""
        return tuple(self.blocks[at] for at in self.odd_places)


def judge_slopes(slopes: Slopes, num_workers: int) -> SlopeVerdict:
    """Return whether the given gradient is the derivative of the loss."""
    scaled = slopes.scale or 1.0
    clipped = slopes.clipped if np.isfinite(slopes.clipped) and 0 < slopes.clipped < 1 else 1.0
    each = [_Block(slopes, at, clipped / scaled) for at in range(len(slopes.labels))]
    clear = [block for block in each if block.along_clear or block.signs_clear]
    if 2 * len(clear) < len(each) or not any(block.along_clear for block in each):
        return SlopeVerdict(
            SlopeAnswer.UNCLEAR, float("nan"), tuple(b.described(1.0) for b in each)
        )
    per_worker = slopes.num_ranks / num_workers
    common = float(median(np.array([b.ratio for b in each if b.along_clear])))
    meant = [1.0, per_worker] if slopes.parts and per_worker > 1 else [1.0]
    for factor in dict.fromkeys((*meant, common)):
        if all(block.fits(factor) for block in clear):
            answer = SlopeAnswer.AGREES if factor in meant else SlopeAnswer.FACTOR
            if answer is SlopeAnswer.AGREES and 2 * sum(b.signs_clear for b in each) < len(each):
                answer = SlopeAnswer.UNCLEAR  # a part at right angles could be missing
            found = tuple(block.described(factor) for block in each)
            return SlopeVerdict(answer, factor, found, summed=factor in meant[1:])
    factor = max((*meant, common), key=lambda one: sum(block.fits(one) for block in clear))
    return SlopeVerdict(
        SlopeAnswer.BLOCKS,
        factor,
        tuple(block.described(factor) for block in each),
        tuple(at for at, block in enumerate(each) if not block.fits(factor)),
    )


class _Block:
    """One block's changes, with the loss's factor and clipping taken out."""

    def __init__(self, slopes: Slopes, at: int, factor: float) -> None:
        self._label = slopes.labels[at]
        rounding = slopes.loss * max(slopes.rounds_in / _AVERAGED, 2.4e-7) + slopes.error
        changes_DE = slopes.changes_BDE[at] * factor
        given_DE = slopes.given_BDE[at]
        longer = LENGTHS[1] / LENGTHS[0]
        curved_D = (changes_DE[:, 1] - given_DE[:, 1]) / longer - changes_DE[:, 0] + given_DE[:, 0]
        self._changes_D = changes_DE[:, 0] - (changes_DE[:, 1] / longer - changes_DE[:, 0]) / (
            longer**2 - 1
        )
        self._given_D = given_DE[:, 0]
        self._errors_D = np.abs(curved_D) / (longer**2 - 1) + rounding * abs(factor)
        self._slack = _COARSER if slopes.rounds_in > 1e-6 else 1.0
        self._usual = float(slopes.usual_BD[at, 1])
        # whether the change along the gradient exceeds its error
        self.along_clear = bool(self._errors_D[0] <= _UNCLEAR * abs(self._changes_D[0]))
        # the gradient over the derivative, along the gradient
        self.ratio = float(self._given_D[0] / self._changes_D[0]) if self.along_clear else 1.0
        # the same along random signs
        self.signs_clear = bool(self._errors_D[1] <= _UNCLEAR_SIGNS * self._size(self.ratio))

    def fits(self, factor: float) -> bool:
        """Return whether the gradient is this multiple of the derivative, as far as is clear."""
        return self._fits_along(factor) and self._fits_signs(factor)

    def _fits_along(self, factor: float) -> bool:
        if not self.along_clear:
            return True
        far = abs(self._given_D[0] / factor - self._changes_D[0])
        return bool(far <= self._errors_D[0] + self._slack * _SAME * abs(self._changes_D[0]))

    def _fits_signs(self, factor: float) -> bool:
        if not self.signs_clear:
            return True
        far = abs(self._given_D[1] / factor - self._changes_D[1])
        slack = self._slack * _SAME_SIGNS * self._size(factor)
        return bool(far <= _SURE * self._errors_D[1] + slack)

    def _size(self, factor: float) -> float:
        """Return the usual change along random signs, if the gradient is this multiple."""
        return max(abs(float(self._changes_D[1])), self._usual / (abs(factor) or 1.0))

    def described(self, factor: float) -> BlockSlope:
        """Return it for a finding."""
        clear = 0 if self.along_clear else 1
        change = float(self._changes_D[clear])
        known = (self.along_clear or self.signs_clear) and change != 0
        ratio = float(self._given_D[clear]) / change if known else float("nan")
        bound = float(self._errors_D[clear]) / abs(change) if change else float("inf")
        multiple = self.along_clear and ratio > 0 and self._fits_signs(ratio)
        return BlockSlope(self._label, ratio, bound, lacks=not multiple)
