"""What a step was computed from, and its loss: samples, label tokens, losses of two sides."""

import math
from collections import Counter
from dataclasses import replace

from rankscope.bus.parity import GRADIENT
from rankscope.tools.parity.pair import StepPair, unequal_copies
from rankscope.tools.parity.reading import SideStep
from rankscope.tools.parity.result import Answer, ratio_of, times
from rankscope.tools.stages import Stage

_MANY = 64  # label tokens, or elements, that are the same: not by chance
_LABELS = {"labels", "shift_labels"}  # inputs of a model that are no data of a sample
_LABELS_OF_PIECES = (
    "Shift and mask labels before a sequence is cut: the last label of a piece is the first token "
    "of the next one."
)
_OF_A_SAMPLE = 0.01  # share of its part in the gradient that a bound may be


def data(pair: StepPair) -> Answer | None:
    """Compare samples and label tokens; those that leave the gradient as it is are noted."""
    num_samples = max(len(pair.a.samples), len(pair.b.samples))
    num_labels = max((each.labels[0] for each in (pair.a, pair.b) if each.labels), default=0)
    for stage, text, count in (
        (Stage.SAMPLES, samples_apart(pair), num_samples),
        (Stage.LABELS, _labels_apart(pair), num_labels),
    ):
        if not text:
            continue
        if not _leave_gradient(pair, 1 / count):
            pair.notes.add("Gradients are not compared, for they belong to other data.")
            answer = pair.differ_by(stage, text)
            pieces = stage is Stage.LABELS and len(pair.a.samples) != len(pair.b.samples)
            return replace(answer, remedy=_LABELS_OF_PIECES) if pieces else answer
        pair.notes.add(
            f"{text} The gradient is the same: they make no difference.",
            unless=text.partition(" in step ")[0],
        )
    return None


def _leave_gradient(pair: StepPair, share: float) -> bool:
    """Return whether gradients are the same, by bounds far below one sample's ``share``."""
    bound, _ = pair.could_miss().get(GRADIENT, (math.inf, math.inf))
    return (
        bound < _OF_A_SAMPLE * share
        and not pair.apart(GRADIENT)
        and unequal_copies(pair, GRADIENT) is None
    )


def samples_apart(pair: StepPair) -> str:
    """Return how samples differ, empty if they do not."""
    a = pair.a
    b = pair.b
    notes = pair.notes
    if not (len(a.samples) and len(b.samples)):
        notes.add("The samples of a side are unknown, and were not compared.")
        return ""
    own = Counter(a.samples.tolist())
    other = Counter(b.samples.tolist())
    if own == other:
        return ""
    missing = own - other
    added = other - own
    same = _the_same_in_pieces(a, b) if missing == own else ""
    if same:
        notes.add(
            "The sides cut their samples into other pieces, as context parallelism does: "
            f"{same} are the same."
        )
        return ""
    lost = sum(missing.values())
    words = [f"{lost or 'all'} of A's {len(a.samples)} samples are {'not ' * (lost > 0)}in B"]
    if len(a.samples) != len(b.samples):
        words.append(f"B has {len(b.samples)}")
    twice = [n for n, count in added.items() if count + own[n] > 1 and other[n] > 1]
    if twice:
        drawn = "is drawn" if len(twice) == 1 else "are drawn"
        words.append(f"{len(twice)} {drawn} more than once in B")
    ranks = {int(r) for s, r in zip(b.samples, b.sample_ranks, strict=True) if s in added}
    if ranks and len(ranks) < pair.bounds.b.workers:
        words.append(f"only rank {', '.join(map(str, sorted(ranks)))} of B draws others")
    repeated = _of_another_step(pair, added, which="those" if added == other else "")
    if repeated:
        words.append(repeated)
    elif missing == own:
        notes.add(
            "No sample is in both: noise or augmentation may change them, or one side cuts "
            "them into other pieces, as context parallelism does."
        )
    if a.labels and b.labels and a.labels[0] != b.labels[0]:
        words.append(f"{a.labels[0]:,} label tokens in A, {b.labels[0]:,} in B")
    return f"Other samples in step {pair.number}: {'; '.join(words)}."


def _the_same_in_pieces(a: SideStep, b: SideStep) -> str:
    """Return what shows that samples are the same ones, cut otherwise; empty if nothing does."""
    if a.labels == b.labels and a.labels and a.labels[0] >= _MANY:
        return "the label tokens"
    own = a.elements
    other = b.elements
    if a.labels and b.labels:  # which are compared by themselves
        shared = (own.keys() & other.keys()) - _LABELS
        own, other = ({name: each[name] for name in shared} for each in (own, other))
    many = any(number >= _MANY for number, _ in own.values())
    return "the elements of the model's inputs" if many and own == other else ""


def _of_another_step(pair: StepPair, added: Counter[int], which: str) -> str:
    """Return that the samples ``added`` in B are all of one other step of A; or empty."""
    for number, step in pair.bounds.a.steps.items():
        if number != pair.number and added and added <= Counter(step.samples.tolist()):
            verb = "repeats" if number < pair.number else "skips to"
            return f"B {verb} {which or f'{added.total()} samples'} of A's step {number}"
    return ""


def _labels_apart(pair: StepPair) -> str:
    """Return how label tokens differ, empty if they do not."""
    if pair.a.labels is None or pair.b.labels is None or pair.a.labels == pair.b.labels:
        return ""
    own, _ = pair.a.labels
    other, _ = pair.b.labels
    if own != other:
        words = f"{own:,} label tokens in A and {other:,} in B"
    else:
        words = f"{own:,} label tokens in both, but not the same ones"
    return f"Other label tokens in step {pair.number}: {words}."


def losses_apart(pair: StepPair) -> str:
    """Return how losses differ, empty if they do not."""
    a = pair.a
    b = pair.b
    own = a.loss
    other = b.loss
    if math.isnan(own) or math.isnan(other) or not (len(a.losses) and len(b.losses)):
        return ""
    means = float(a.losses.mean()), float(b.losses.mean())
    bound = pair.bounds.of_loss(pair.number, own, other)
    if min(abs(own - other), abs(means[0] - means[1])) <= bound:
        return ""
    sums = float(a.losses.sum()), float(b.losses.sum())  # as of losses that are sums
    if abs(sums[0] - sums[1]) <= bound * max(len(a.losses), len(b.losses)):
        return ""
    ratio = other / own if own else math.nan
    words = f"The loss of step {pair.number} is {own:.6g} in A and {other:.6g} in B"
    if not ratio > 0:
        return words
    factors = [times(ratio), ratio_of(ratio, pair.sides)]
    return f"{words} ({', '.join(filter(None, factors))})"
