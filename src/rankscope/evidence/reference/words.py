"""The findings of reference steps, in words."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.bus.detector import finding_at
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.evidence.reference.share import ReferenceShare
from rankscope.evidence.reference.slopes import (
    BlockSlope,
    SlopeAnswer,
    Slopes,
    SlopeVerdict,
    judge_slopes,
)
from rankscope.evidence.reference.verify import (
    GradientMismatch,
    OddParameter,
    ReferenceAnswer,
    Verification,
    missing_by_worker,
)
from rankscope.stats.arrays import Floats, median

_MOST_NAMED = 3
_SAME = 0.02

_WEIGHTED = {
    "backward": "each backward pass counts as it was called, since the loss is not known",
    "worker": "each worker's mean loss counts alike",
    "tokens_of_worker": "each label token of a worker counts alike, and so does each worker",
    "token": "each label token counts alike",
    "sum": "the loss is the sum over a worker's label tokens",
}

_LOSS_OUTSIDE = ". The loss, which is computed outside of the model, was not computed again"
_FROM_OUTPUTS = ", given the gradients that the loss gave to the model's outputs"

_LOSS_RIGHT = (
    ". The loss, which is computed outside of the model and exchanges tensors between the ranks, "
    "was computed again with other outputs of the model: what it gave back to them is its "
    "derivative"
)

_LOSS_DIVIDED = (
    ", times {factor:.3g}: each rank differentiates the loss of all that it exchanges tensors "
    "with, and the mean over workers divides it once more"
)

_LOSS_UNCHECKED = (
    "the loss, which is computed outside of the model, exchanges tensors between the ranks, and "
    "was not computed again: {}"
)

_BY_OPTIMIZER = (
    "the optimizer was given each worker's own gradient: it reduces by itself, or nobody does"
)

_OF_THE_LOOP = (
    "the training's loop puts another gradient in place of the sum of the workers', the same for "
    "all of them, as a noisy sum of clipped ones: what it should be is not known"
)

_UNCLEAR = (
    "no worker can compute it alone, and rounding or jumps of the loss hide how it changes where "
    "blocks of parameters are moved"
)

_FAR = 0.5  # relative, from any sum: as far as the audit of a loop's reduction goes
_MOST_CHANGED = 1e-6  # relative effect of rounding on a factor of 1


@dataclass(frozen=True, slots=True)
class LossCheck:
    """What is known of the gradient that a loss outside of the model gave to the outputs."""

    outside: bool = False
    unchecked: str = ""  # why a loss that exchanges tensors was not computed again
    verdict: SlopeVerdict | None = None  # of one that was
    num_ranks: int = 1

    @classmethod
    def of(cls, parts: Sequence[ReferenceShare], num_workers: int) -> "LossCheck":
        """Return it from the parts of all workers."""
        outside = any(part.loss_outside for part in parts)
        unchecked = next((part.loss_unchecked for part in parts if part.loss_unchecked), "")
        slopes = next((part.loss_slopes for part in parts if part.loss_slopes is not None), None)
        if slopes is None or unchecked:
            return cls(outside, unchecked)
        verdict = judge_slopes(slopes, num_workers)
        if verdict.answer is SlopeAnswer.UNCLEAR:
            return cls(outside, "rounding or jumps hide how it changes")
        return cls(outside, "", verdict, slopes.num_ranks)

    @property
    def _divided(self) -> bool:
        """Whether what came back is the derivative, over the ranks of a group or times them."""
        if self.verdict is None or self.verdict.answer is not SlopeAnswer.FACTOR:
            return False
        factor = self.verdict.factor
        groups = [n for n in range(2, self.num_ranks + 1) if self.num_ranks % n == 0]
        return any(abs(factor * n - 1) < _SAME for of in groups for n in (of, 1 / of))

    @property
    def taken(self) -> bool:
        """Whether that gradient was used as it was."""
        return self.outside and self.verdict is None

    @property
    def words(self) -> str:
        """What stands behind an agreement."""
        if self.verdict is not None:
            return _LOSS_RIGHT
        return _LOSS_OUTSIDE if self.taken else ""

    @property
    def factor_words(self) -> str:
        """The factor of an agreement, in words; empty without one."""
        if self.verdict is None or not self._divided:
            return ""
        return _LOSS_DIVIDED.format(factor=self.verdict.factor)

    def finding(self, step: int) -> Finding | None:
        """Return the finding that takes the place of an agreement; None if it stands."""
        if self.unchecked:
            return declined(_LOSS_UNCHECKED.format(self.unchecked), (), step)
        if self.verdict is None or self.verdict.answer is SlopeAnswer.AGREES or self._divided:
            return None
        (block,) = self.verdict.blocks
        how = f"it is {block.ratio:.3g} times that"
        if self.verdict.answer is SlopeAnswer.BLOCKS:
            how = _ELSEWHERE
        fields: dict[str, object] = {"step": f"{step:,}", "how": how}
        numbers = {"ratio": block.ratio, "bound": block.bound}
        return finding_at(step, "verify.loss", Severity.WARNING, (), fields, numbers)


_NOTHING_OUTSIDE = LossCheck()


def verified(
    found: Verification,
    step: int,
    num_workers: int,
    num_micro: int,  # most micro-batches of a worker
    *,
    loss: LossCheck = _NOTHING_OUTSIDE,
    by_loop: bool = False,  # the training's own loop reduces
    clips: bool = False,  # known to: it called torch in the step, or the plan has a limit
    planned: bool = False,  # the plan has the weights
) -> Finding:
    """Return the finding of a reference step.

    A loop that reduces by itself may clip before its gradient is seen, may intend a sum, may make a
    gradient of its own, and may leave the reduction to its optimizer. A gradient that became
    smaller after the reduction agrees where it is known that the training clips; elsewhere the
    factor is a note.
    """
    if by_loop and any(odd.how is GradientMismatch.NOT_REDUCED for odd in found.odd):
        return declined(_BY_OPTIMIZER, (), step)
    if by_loop and found.answer is ReferenceAnswer.GRADIENT and found.from_sums > _FAR:
        return declined(_OF_THE_LOOP, (), step)
    smaller = found.answer is ReferenceAnswer.SCALE and 0 < found.factor < 1
    if by_loop and smaller and not _guess(found.factor, num_workers, num_micro):
        found = replace(found, answer=ReferenceAnswer.AGREES, clipped=found.factor)
    if found.clipped != 1 and not clips:
        found = replace(found, answer=ReferenceAnswer.SCALE)
    micro_batches = count(num_micro, "micro-batch", "micro-batches")
    if found.answer is ReferenceAnswer.AGREES:
        instead = loss.finding(step)
        if instead is not None:
            return instead
    fields = {
        "step": f"{step:,}",
        "right": f"what one process would compute{_FROM_OUTPUTS if loss.taken else ''}",
        "how_computed": "It was computed again on "
        f"{count(num_workers, 'worker')}, each with {micro_batches}, one micro-batch "
        f"at a time, without a wrapper; {_WEIGHTED[found.weighting]}{loss.words}",
        "weighted": _WEIGHTED[found.weighting],
        **_fields(found, num_workers, num_micro),
    }
    fields["clipped"] = f"{fields['clipped']}{loss.factor_words}"
    severity = _severity(found, num_workers, num_micro, planned=planned)
    if by_loop and found.answer is ReferenceAnswer.SCALE:
        severity = min(severity, Severity.WARNING)
    ranks = _ranks(found)
    return finding_at(step, f"verify.{found.answer}", severity, ranks, fields, _numbers(found))


def _severity(found: Verification, num_workers: int, num_micro: int, *, planned: bool) -> Severity:
    """Return the severity: a loss may have a factor, and micro-batches weights, on purpose.

    Losses of all workers that have other weights, whose mean is 1, are a mixture.
    """
    if found.answer is ReferenceAnswer.WEIGHTING and found.in_loss and not planned:
        weights = [min(own) for own in found.ratios]
        alike = all(max(own) - min(own) <= _SAME * max(own) for own in found.ratios)
        apart = all(abs(weight - 1) > _SAME for weight in weights)
        if alike and apart and abs(sum(weights) / len(weights) - 1) <= _SAME:
            return Severity.NOTE
    if found.answer is ReferenceAnswer.AGREES or found.clipped != 1:
        return Severity.NOTE
    meant = False
    if found.answer is ReferenceAnswer.SCALE:
        meant = not _guess(found.factor, num_workers, num_micro)
    elif found.answer is ReferenceAnswer.WEIGHTING:
        meant = any(max(own) - min(own) > _SAME * max(own) for own in found.ratios)
        if not _ranks(found):
            meant = not _guess(_common(found), num_workers, num_micro)
    unknown = found.weighting == "backward" and found.answer in (
        ReferenceAnswer.SCALE,
        ReferenceAnswer.WEIGHTING,
    )
    return Severity.WARNING if unknown or (meant and found.in_loss) else Severity.ERROR


def derived(
    found: SlopeVerdict,
    slopes: Slopes,
    step: int,
    num_workers: int,
    num_micro: int,  # micro-batches of a worker
    *,
    loss: LossCheck = _NOTHING_OUTSIDE,
    by_loop: bool = False,
) -> Finding:
    """Return the finding of directional derivatives."""
    if found.answer is SlopeAnswer.UNCLEAR:
        return declined(_UNCLEAR, (), step)
    guess = _guess_factor(found.factor, num_workers, num_micro, slopes.num_ranks // num_workers)
    in_loss = abs(slopes.scale / found.factor - 1) < _SAME
    agrees = found.answer is SlopeAnswer.AGREES
    times = f", times {slopes.clipped:.3g} after the reduction" if 0 < slopes.clipped < 1 else ""
    if found.answer is SlopeAnswer.FACTOR and not guess and (in_loss or by_loop):
        agrees = in_loss or 0 < found.factor < 1
        where = "what the loss is multiplied by" if in_loss else "as clipping does"
        times = f", times {found.factor:.3g}, {where}"
    farthest = max(found.blocks, key=lambda one: _distance(one, found.factor))
    far = _distance(farthest, found.factor)
    ranks = count(slopes.num_ranks, "rank")
    losses = "the losses of a worker's ranks are added up" if found.summed else "their mean counts"
    fields: dict[str, object] = {
        "step": f"{step:,}",
        "right": "the derivative of the loss",
        "clipped": f"{times}{loss.factor_words}",
        "ulps": f"{far:.1g} of it",
        "how_computed": (
            f"Blocks of parameters were moved up and down, and each time all {ranks} ran the "
            f"training's own forward pass, since no worker can compute it alone; {losses}"
            f"{loss.words}"
        ),
        "error": f"{far:.1e}",
        "parameter": farthest.label,
        "bound": f"{farthest.bound:.1e}",
        "blocks": _slopes_in_words(found, guess, in_loss=in_loss),
        "ranks": ranks,
    }
    numbers = {
        "blocks": [[one.label, one.ratio, one.bound] for one in found.blocks],
        "loss_factor": slopes.scale,
    }
    if agrees:
        agreed = finding_at(step, "verify.agrees", Severity.NOTE, (), fields, numbers)
        return loss.finding(step) or agreed
    meant = found.answer is SlopeAnswer.FACTOR and not guess
    severity = Severity.WARNING if meant else Severity.ERROR
    return finding_at(step, "verify.derivative", severity, (), fields, numbers)


def _distance(one: BlockSlope, factor: float) -> float:
    far = abs(one.ratio / factor - 1)
    return far if far == far else 0.0


def _slopes_in_words(found: SlopeVerdict, guess: str, *, in_loss: bool) -> str:
    """Return which blocks have which multiple of the derivative."""
    if found.answer is SlopeAnswer.FACTOR:
        where = "; the loss had it when backward was called" if in_loss else ""
        return f"it is {found.factor:.3g} times that in all blocks of parameters{guess}{where}"
    by_how: dict[str, list[str]] = {}
    for one in found.odd:
        where = f"some of {one.label}" if one.several else one.label
        by_how.setdefault(_how_far(one, found.factor), []).append(where)
    parts = [f"in {shortened(labels, _MOST_NAMED)} {how}" for how, labels in by_how.items()]
    more = ["in other blocks it differs otherwise"] if parts[_MOST_NAMED:] else []
    return "; ".join([*parts[:_MOST_NAMED], *more])


def _how_far(one: BlockSlope, factor: float) -> str:
    """Return how a gradient differs; of several parameters the factor is no single one's."""
    if one.ratio == 0:
        return "it is 0"
    if one.lacks:
        return _ELSEWHERE
    times = f"{_apart(one.ratio, factor)} times that"
    return f"it differs ({times} in all of them together)" if one.several else f"it is {times}"


def _apart(ratio: float, factor: float) -> str:
    """Return a ratio with as many digits as set it apart from the factor of most blocks."""
    written = (f"{ratio:.{digits}g}" for digits in range(2, 7))
    return next((w for w in written if w != f"{factor:.2g}"), f"{ratio:.2g}")


def _guess_factor(factor: float, num_workers: int, num_micro: int, per_worker: int) -> str:
    """Return the products of numbers of workers, micro-batches and ranks that a factor may be."""
    counts = {
        "workers": num_workers,
        "micro-batches": num_micro,
        "ranks of a worker": per_worker,
    }
    counts = {name: number for name, number in counts.items() if number > 1}
    fitting = []
    for chosen in (c for size in range(1, 4) for c in itertools.combinations(counts, size)):
        product = math.prod(counts[name] for name in chosen)
        if abs(factor / product - 1) < _SAME:
            fitting.append(f"multiplied by the number of {' and of '.join(chosen)}")
        elif abs(factor * product - 1) < _SAME:
            fitting.append(f"divided once too often by the number of {' and of '.join(chosen)}")
    known = [words for words in fitting if "ranks of a worker" not in words] or fitting
    return f", as if {' or '.join(known)}" if known else ""


_ELSEWHERE = "it points elsewhere, as a part of it is missing or too much"


def declined(why: str, ranks: Sequence[int], step: int) -> Finding:
    """Return the finding of a step whose gradient was not checked."""
    named = f" ({name_ranks(ranks)})" if ranks else ""
    fields = {"step": f"{step:,}", "why": why, "who": named}
    return finding_at(step, "verify.declined", Severity.NOTE, ranks, fields, {"why": why})


def _fields(found: Verification, num_workers: int, num_micro: int) -> dict[str, object]:
    clipped = ""
    if found.clipped != 1:
        clipped = f", times {found.clipped:.3g} after the reduction, as clipping does"
    if found.shrunk:
        least = f"{min(found.shrunk):.2g}"
        most = f"{max(found.shrunk):.2g}"
        clipped += f", times {least} to {most} of each parameter's own after the reduction"
    if found.by_value:
        clipped += ", clipped by value after the reduction"
    if found.summed:
        names = shortened(list(found.summed), _MOST_NAMED)
        clipped += f", without {names}, changed after it as stages do that share a weight"
    if found.held:
        clipped += f", without {shortened(list(found.held), _MOST_NAMED)}, held back after it"
    place = "it became so in the reduction, or after it"
    if found.in_loss:
        place = "it was so when backward was called"
    elif abs(found.changed - 1) > _MOST_CHANGED:
        place = "it became so after the reduction"
    others = ""  # the weight of the micro-batches that are there
    if abs(found.factor - 1) > _SAME:
        others = f"; the others count {found.factor:.3g} times what is meant"
    return {
        "error": f"{found.error:.1e}",
        "bound": f"{found.bound:.1e}",
        "ulps": f"{found.ulps:.2g} ulp of {found.dtype}",
        "parameter": found.parameter,
        "clipped": clipped,
        "factor": f"{found.factor:.3g}",
        "guess": _guess(found.factor, num_workers, num_micro),
        "place": place,
        "basis": ", if each backward pass counts as it was called (the loss is not known)"
        if found.weighting == "backward"
        else "",
        "others": others,
        "missing": _missing(found),
        "how": _weights(found) if found.answer is ReferenceAnswer.WEIGHTING else _odd(found),
    }


def _guess(factor: float, num_workers: int, num_micro: int) -> str:
    """Return the likely cause of a factor, in words; empty without."""
    causes = [
        (num_workers, "summed over the workers and not averaged"),
        (1 / num_workers, "averaged over the workers twice"),
        (num_micro, "summed over micro-batches and not averaged"),
        (1 / num_micro, "averaged over micro-batches twice"),
    ]
    fitting = [words for value, words in causes if value != 1 and abs(factor / value - 1) < _SAME]
    return f", as if {' or '.join(fitting)}" if fitting else ""


def _missing(found: Verification) -> str:
    """Return which micro-batches are missing: ``micro-batches 1 to 3 of every worker``."""
    absent = dict(missing_by_worker(found.ratios))
    if not absent:
        return ""
    by_which: dict[tuple[int, ...], list[int]] = {}
    for rank, which in absent.items():
        by_which.setdefault(which, []).append(rank)
    parts = []
    for which, ranks in by_which.items():
        everyone = len(ranks) == len(found.ratios) > 1
        whole = all(len(which) == len(found.ratios[rank]) for rank in ranks)
        what = "all micro-batches" if whole else _numbered(which)
        parts.append(f"{what} of {'every worker' if everyone else name_ranks(ranks)}")
    return listed(parts)


def _numbered(which: Sequence[int]) -> str:
    """Return micro-batches by their numbers, from 1 on."""
    first = which[0] + 1
    last = which[-1] + 1
    if len(which) == 1:
        return f"micro-batch {first}"
    if len(which) > 2 and last - first == len(which) - 1:
        return f"micro-batches {first} to {last}"
    return f"micro-batches {listed([str(micro + 1) for micro in which])}"


def _weights(found: Verification) -> str:
    """Return whose micro-batches have other weights."""
    common = _common(found)
    ranks = _ranks(found)
    if not ranks:
        ratios = [ratio for own in found.ratios for ratio in own]
        return f"every worker {min(ratios):.3g} to {max(ratios):.3g} times"
    parts = []
    for rank in ranks:
        own = [ratio / common for ratio in found.ratios[rank]]
        least = min(own)
        most = max(own)
        if most - least <= _SAME * most:
            parts.append(f"{name_ranks([rank])} {most:.3g} times")
        else:
            parts.append(f"{name_ranks([rank])} {least:.3g} to {most:.3g} times")
    return shortened(parts, _MOST_NAMED)


def _common(found: Verification) -> float:
    """Return the ratio that counts as right: 1 where some have it, else the middle one."""
    ratios = [ratio for of_worker in found.ratios for ratio in of_worker]
    if any(abs(ratio - 1) <= _SAME for ratio in ratios):
        return 1.0
    values: Floats = np.array(ratios)
    return float(median(values)) or 1.0


def _ranks(found: Verification) -> tuple[int, ...]:
    """Return the workers that an answer is about; none where all are alike."""
    if found.answer is ReferenceAnswer.MICRO_BATCHES:
        ranks = tuple(rank for rank, _ in missing_by_worker(found.ratios))
        return () if len(ranks) == len(found.ratios) else ranks
    if found.answer is not ReferenceAnswer.WEIGHTING:
        return ()
    common = _common(found)
    return tuple(
        rank
        for rank, own in enumerate(found.ratios)
        if any(abs(ratio / common - 1) > _SAME for ratio in own)
    )


def _odd(found: Verification) -> str:
    """Return which parameters differ, and how: ``in norm.weight alone: not reduced``."""
    by_how: dict[str, list[str]] = {}
    for one in found.odd:
        by_how.setdefault(_how(one), []).append(one.name)
    parts = []
    for how, names in by_how.items():
        everywhere = len(names) == found.num_parameters
        where = "every parameter" if everywhere else shortened(names, _MOST_NAMED)
        parts.append((f"in {where}", how))
    if len(parts) == 1:
        ((where, how),) = parts
        return f"{where}{'' if len(found.odd) == found.num_parameters else ' alone'}: {how}"
    return "; ".join(f"{where}: {how}" for where, how in parts)


def _how(one: OddParameter) -> str:
    far = (
        "one process would have none"
        if math.isinf(one.error)
        else f"by {one.error:.2g} of its norm"
    )
    words = {
        GradientMismatch.NOT_REDUCED: "not reduced, every worker holds its own",
        GradientMismatch.MISSING: "there is none",
        GradientMismatch.SCALE: f"{one.factor:.3g} of it",
        GradientMismatch.PARTIAL: f"not reduced over {one.axis}",
        GradientMismatch.CHANGED: far,
    }[one.how]
    return f"{words}, since something after the reduction" if one.afterwards else words


def _numbers(found: Verification) -> dict[str, object]:
    numbers: dict[str, object] = {
        "weighting": found.weighting,
        "error": found.error,
        "bound": found.bound,
        "parameter": found.parameter,
        "ulps": found.ulps,
        "factor": found.factor,
    }
    if found.clipped != 1:
        numbers["clipped"] = found.clipped
    if found.ratios:
        numbers["ratios"] = [list(of_worker) for of_worker in found.ratios[:16]]
    if found.odd:
        numbers["parameters"] = [[one.name, str(one.how)] for one in found.odd[:64]]
    return numbers
