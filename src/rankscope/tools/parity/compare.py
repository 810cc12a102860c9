"""Compares two recorded trainings: the first thing that differs, in the order of causes."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.parity import (
    BUFFER,
    GRADIENT,
    HELD,
    MOMENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    QUARTERS,
    START,
    UNCLIPPED,
    UPDATE,
    WIDTH,
)
from rankscope.bus.words import first_of
from rankscope.tools.parity.reading import (
    Bounds,
    Recording,
    SideStep,
    Whole,
    distance,
    factor,
    identical,
    is_clipped,
    joined,
    part_of,
    spread_distance,
)
from rankscope.tools.parity.result import (
    NOT_FINITE,
    Answer,
    Difference,
    Kind,
    describe,
    likely,
    times,
)
from rankscope.tools.stages import CLASS_OF, DiffClass, Stage

_MOST_NOTES = 4
_LEAST_SCALER = 32.0
_MUCH = 0.02
_SAME_START = 1e-5
_MANY_LABELS = 64  # that are the same tokens: not by chance
_OF_A_SAMPLE = 0.01  # share of its part in the gradient that a bound may be
_GENERATORS = ("torch's on the CPU", "the accelerator's")  # those that a model draws from
_STAGE_OF = {
    START: Stage.START,
    GRADIENT: Stage.GRADIENT,
    UPDATE: Stage.UPDATE,
}


def decide(
    a: Recording,
    b: Recording,
    again: Callable[[Recording, float], Recording],
    *,
    repeats_a: bool = True,
) -> Answer:
    """Return the answer for two recorded trainings, by a perturbation run unless they are equal.

    ``again`` records a side once more, with a quarter of its parameters' elements moved by a
    relative size; that is B where A cannot run again, or computes in a finer type.
    """
    answer = compare(Bounds(a, b))
    if answer.kind is Kind.NOT_COMPARABLE:
        return answer
    if answer.kind is Kind.SAME and identical(a, b):
        return replace(answer, difference=DiffClass.IDENTICAL)
    original = b if not repeats_a or b.roundoff > a.roundoff else a
    moved = again(original, 2 * original.roundoff)
    why = _why_not_repeatable(original, moved)
    if why:
        return Answer(Kind.NOT_COMPARABLE, f"Not comparable: {why}.")
    return compare(Bounds(a, b, original, moved))


def decide_resumed(
    a: Recording,
    b: Recording,
    resume: Callable[[], Recording],
    again: Callable[[Recording, float], Recording],
    *,
    repeats_a: bool = True,
) -> Answer:
    """Return the answer for a training that went on, one that was ended, and its resumption.

    ``resume`` records the resumption, if the steps before it are the same; ``again`` is as in
    :func:`decide`.
    """
    at = max(b.steps) + 1
    answer = decide(part_of(a, 0, at), b, again, repeats_a=repeats_a)
    if answer.kind is not Kind.SAME:
        return answer
    resumed = replace(resume(), name="B")
    sides = joined(a, resumed, at)
    if answer.difference is DiffClass.IDENTICAL and resumed.world == a.world:
        return compare(Bounds(*sides))
    return decide(*sides, again, repeats_a=repeats_a)


def _why_not_repeatable(side: Recording, again: Recording) -> str:
    """Return why a training cannot be compared with any other; empty if it does the same again."""
    steps = sorted(set(side.steps) & set(again.steps))
    pairs = [(side.steps[number], again.steps[number]) for number in steps]
    if any(not _same_samples(*pair) for pair in pairs):
        return f"{side.name} draws other samples each time it runs: give its data loader a seed"
    from_the_start = steps[:1] == [min(again.steps)]  # not of a resumption
    if from_the_start and not all(
        distance(own, other) <= _SAME_START * max(own.norm, other.norm)
        for _, own, other in _both(*pairs[0], START)
    ):
        return (
            f"{side.name} begins with other parameters each time it runs: give it a seed, or use "
            "--same-start"
        )
    return ""


def _same_samples(a: SideStep, b: SideStep) -> bool:
    return Counter(a.samples.tolist()) == Counter(b.samples.tolist())


def compare(bounds: Bounds) -> Answer:
    """Return the answer for two recorded trainings, by the steps that both have."""
    return _Comparison(bounds).answer()


def why_not_comparable(a: Recording, b: Recording) -> str:
    """Return why two trainings cannot be compared, empty if they can."""
    names = _trained(a) ^ _trained(b)
    if names:
        shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
        return f"{len(names)} trained parameters are in one of them alone ({shown}); see --map"
    shapes = [n for n in _trained(a) if n in a.shapes and a.shapes[n] != b.shapes.get(n)]
    if shapes:
        name = shapes[0]
        return f"{name} is {_size(a.shapes[name])} in A and {_size(b.shapes.get(name, ()))} in B"
    if not set(a.steps) & set(b.steps):
        return "they have no step in common"
    return ""


def _trained(side: Recording) -> set[str]:
    first = side.steps[min(side.steps)] if side.steps else SideStep()
    return set(map(str, first.facts.get("trained", ())))


def _size(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a number"


class _Comparison:
    """One comparison."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._a, self._b = bounds.a, bounds.b
        self._sides = (self._a, self._b)
        self._notes: list[str] = []
        self._harmless: set[Stage] = set()  # whose data differ and make no difference
        self._compared = 0
        self._other_settings = False

    def answer(self) -> Answer:
        """Return the answer."""
        why = why_not_comparable(self._a, self._b)
        if why:
            return Answer(Kind.NOT_COMPARABLE, f"Not comparable: {why}.")
        steps = sorted(set(self._a.steps) & set(self._b.steps))
        for number in steps:
            pair = self._a.steps[number], self._b.steps[number]
            found = self._step(number, *pair, first=number == steps[0])
            if found is not None:
                return found
        for number, side in itertools.product(steps, self._sides):
            missing = [k for k in (GRADIENT, UPDATE) if not side.steps[number].figures.get(k)]
            if missing:
                what = f"no {' and no '.join(missing)} of {side.name} was recorded in step {number}"
                return self._made(Kind.NOT_COMPARABLE, f"Not comparable: {what}.", number)
        others = {
            str(name)
            for side in self._sides
            for step in side.steps.values()
            for name in step.facts.get("others", ())
        }
        if others:
            what = (
                "another model is trained beside the one that was compared, which is the same; "
                f"its optimizer is {' and '.join(sorted(others))}"
            )
            return self._made(Kind.NOT_COMPARABLE, f"Not comparable: {what}.", steps[-1])
        if any(self._draw_otherwise(self._a.steps[n], self._b.steps[n]) for n in steps):
            self._notes.append(self._drew())
        plural = "s" if len(steps) != 1 else ""
        headline = f"The same within rounding, over {len(steps)} step{plural}."
        return self._made(Kind.SAME, headline, len(steps))

    def _step(self, number: int, a: SideStep, b: SideStep, *, first: bool) -> Answer | None:
        if first:
            found = self._start(number, a, b)
            if found is not None:
                return found
        found = self._unequal(number, a, b, START)
        found = found or (None if first else self._untouched(number, a, b))
        found = found or self._data(number, a, b)
        if found is not None:
            return found
        unequal = self._unequal(number, a, b, GRADIENT, UPDATE)
        loss = self._loss(number, a, b)
        gradient = self._gradient(number, a, b)
        if loss and gradient is None and unequal is None:
            self._note(f"{loss}; its gradient is the same.")
            loss = ""
        if (loss or gradient is not None) and self._draw_otherwise(a, b):
            return self._made(Kind.NOT_COMPARABLE, f"Not comparable: {self._drew()}", number + 1)
        if loss or gradient is not None:
            inside = self._inside(number, a, b)
            gradient = gradient and replace(gradient, notes=(*inside, *gradient.notes))
        if loss:
            found = self._made(Kind.DIFFERENT, f"{loss}.", number, Stage.LOSS)
            return replace(found, notes=(*inside, *found.notes))
        if gradient is not None and unequal is not None and gradient.stage is unequal.stage:
            return replace(gradient, notes=(unequal.headline, *gradient.notes))
        return gradient or unequal or self._update(number, a, b) or self._state(number, a, b)

    # Stages ----------------------------------------------------------------------------------

    def _start(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        resumed = bool(a.facts.get("resumed"))
        found = self._apart(number, START, a, b, start=not resumed)
        num_parameters = self._compared
        buffers = self._apart(number, BUFFER, a, b, start=not resumed)
        if found or buffers:
            self._compared = num_parameters if found else self._compared
            words = "it resumes with others" if resumed else "the start differs"
            what = "parameter" if found else "buffer"
            return self._different(number, Stage.START, found or buffers, words, what)
        held = self._held(number, a, b)
        if held is None and resumed:
            return self._scaler(number, a, b) or self._random(number, a, b)
        return held

    def _untouched(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        """Compare at a later start what no optimizer was seen to update.

        Such are a teacher's parameters, and those of an optimizer that torch does not know; and
        buffers, where both sides deal out the batch alike: running statistics are of a part of it.
        """
        updated = _trained(self._a) & {
            name
            for side in self._sides
            for step in side.steps.values()
            for name in step.figures.get(UPDATE, ())
        }
        found = [d for d in self._apart(number, START, a, b) if d.name not in updated]
        if not found and (self._a.workers, self._a.passes) == (self._b.workers, self._b.passes):
            buffers = self._apart(number, BUFFER, a, b)
            words = "the start differs in what no optimizer updates"
            if buffers:
                return self._different(number, Stage.START, buffers, words, "buffer")
        if not found:
            return None
        self._compared = len(self._a.shapes.keys() - updated)
        trained = any(each.name in _trained(self._a) for each in found)
        what = "no optimizer of torch's updates" if trained else "is not trained"
        return self._different(number, Stage.START, found, f"the start differs in what {what}")

    def _random(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        """Compare the random generators rank by rank: of a resumption in the same layout."""
        if set(a.random) != set(b.random):
            return None
        ranks = [
            rank for rank in a.random if not _has_same_generators(a.random[rank], b.random[rank])
        ]
        if not ranks:
            return None
        owners = {
            rank: next(
                (r for r in a.random if _has_same_generators(a.random[r], b.random[rank])), -1
            )
            for rank in ranks
        }
        swapped = sorted(owners.values()) == sorted(ranks)
        held = [
            f"rank {rank} holds {'another one' if owner < 0 else f'that of rank {owner}'}"
            for rank, owner in list(owners.items())[:3]
        ]
        more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
        state = f"The random state of step {number} is "
        state += "restored to other ranks, by a permutation" if swapped else "not restored"
        text = f"{state}: {'; '.join(held)}{more}."
        if any(side.drawn for side in self._sides):
            self._note(self._samples(number, a, b))
            return self._made(Kind.DIFFERENT, text, number, Stage.RANDOM)
        self._note(f"{text} No random numbers are drawn inside the forward pass.")
        return None

    def _draw_otherwise(self, a: SideStep, b: SideStep) -> bool:
        """Return whether the forward pass draws random numbers that may differ between the sides.

        A resumption in the same layout draws the same ones from the same random state.
        """
        if not any(side.drawn for side in self._sides):
            return False
        resumed = any(step.facts.get("resumed") for step in self._a.steps.values())
        return not (
            resumed
            and set(a.random) == set(b.random)
            and all(_has_same_generators(a.random[rank], b.random[rank]) for rank in a.random)
        )

    def _scaler(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        """Compare the gradient scalers of a resumption."""
        own, other = (dict(step.facts.get("scaler", {})) for step in (a, b))
        for name in dict.fromkeys([*own, *other]):
            first, second = own.get(name, "none"), other.get(name, "none")
            if first != second:
                text = (
                    f"In step {number} the gradient scaler is not restored: its "
                    f"{name.strip('_').replace('_', ' ')} is {first} in A and {second} in B."
                )
                return self._made(Kind.DIFFERENT, text, number, Stage.STATE)
        return None

    def _held(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        """Compare what the optimizers hold before their first call."""
        for kind in self._moments(HELD, a, b):
            found = self._apart(number, kind, a, b, start=kind not in a.figures)
            if found:
                words = (
                    f"the optimizer holds another {kind.removeprefix(HELD)} before its first call"
                )
                return self._different(number, Stage.STATE, found, words)
        counters = [dict(s.facts.get("held counters", {})) for s in (a, b)]
        words = _counters_apart(counters[0], counters[1])
        if words:
            words = f"before its first call {words}"
            return self._made(
                Kind.DIFFERENT, f"{words[0].upper()}{words[1:]}.", number, Stage.STATE
            )
        return None

    def _data(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        """Compare samples and label tokens; those that leave the gradient as it is are noted."""
        num_samples = max(len(a.samples), len(b.samples))
        num_labels = max((each.labels[0] for each in (a, b) if each.labels), default=0)
        for stage, text, count in (
            (Stage.SAMPLES, self._samples(number, a, b), num_samples),
            (Stage.LABELS, self._labels(number, a, b), num_labels),
        ):
            if not text:
                continue
            if self._leave_gradient(number, a, b, 1 / count):
                if stage not in self._harmless:
                    self._note(f"{text} The gradient is the same: they make no difference.")
                self._harmless.add(stage)
                continue
            self._note("Gradients are not compared, for they belong to other data.")
            return self._made(Kind.DIFFERENT, text, number, stage)
        return None

    def _leave_gradient(self, number: int, a: SideStep, b: SideStep, share: float) -> bool:
        """Return whether gradients are the same, by bounds far below one sample's ``share``."""
        bound, _ = self._could_miss(number).get(GRADIENT, (math.inf, math.inf))
        return (
            bound < _OF_A_SAMPLE * share
            and not self._apart(number, GRADIENT, a, b)
            and self._unequal(number, a, b, GRADIENT) is None
        )

    def _samples(self, number: int, a: SideStep, b: SideStep) -> str:
        """Return how samples differ, empty if they do not."""
        if not (len(a.samples) and len(b.samples)):
            self._note("The samples of a side are unknown, and were not compared.")
            return ""
        own, other = Counter(a.samples.tolist()), Counter(b.samples.tolist())
        if own == other:
            return ""
        missing, added = own - other, other - own
        if missing == own and a.labels == b.labels and a.labels and a.labels[0] >= _MANY_LABELS:
            self._note(
                "The sides cut their samples into other pieces, as context parallelism does: the "
                "label tokens are the same."
            )
            return ""
        lost = sum(missing.values())
        words = [f"{lost or 'all'} of A's {len(a.samples)} samples are {'not ' * (lost > 0)}in B"]
        if len(a.samples) != len(b.samples):
            words.append(f"B has {len(b.samples)}")
        twice = [n for n, count in added.items() if count + own[n] > 1 and other[n] > 1]
        ranks = sorted(
            {int(r) for s, r in zip(b.samples, b.sample_ranks, strict=True) if s in added}
        )
        if twice:
            drawn = "is drawn" if len(twice) == 1 else "are drawn"
            words.append(f"{len(twice)} {drawn} more than once in B")
        if ranks and len(ranks) < self._b.workers:
            words.append(f"only rank {', '.join(map(str, ranks))} of B draws others")
        for there, step in self._a.steps.items():
            if there != number and added and not added - Counter(step.samples.tolist()):
                verb = "repeats" if there < number else "skips to"
                which = "those" if added == other else f"{sum(added.values())} samples"
                words.append(f"B {verb} {which} of A's step {there}")
                break
        else:
            self._note(
                "No sample is in both: noise or augmentation may change them, or one side cuts "
                "them into other pieces, as context parallelism does." * (missing == own)
            )
        if a.labels and b.labels and a.labels[0] != b.labels[0]:
            words.append(f"{a.labels[0]:,} label tokens in A, {b.labels[0]:,} in B")
        return f"Other samples in step {number}: {'; '.join(words)}."

    def _labels(self, number: int, a: SideStep, b: SideStep) -> str:
        """Return how label tokens differ, empty if they do not."""
        if a.labels is None or b.labels is None or a.labels == b.labels:
            return ""
        (own, _), (other, _) = a.labels, b.labels
        if own != other:
            words = f"{own:,} label tokens in A and {other:,} in B"
        else:
            words = f"{own:,} label tokens in both, but not the same ones"
        return f"Other label tokens in step {number}: {words}."

    def _loss(self, number: int, a: SideStep, b: SideStep) -> str:
        """Return how losses differ, empty if they do not."""
        own, other = a.loss, b.loss
        if math.isnan(own) or math.isnan(other) or not (len(a.losses) and len(b.losses)):
            return ""
        means = float(a.losses.mean()), float(b.losses.mean())
        bound = self._bounds.of_loss(number, own, other)
        if min(abs(own - other), abs(means[0] - means[1])) <= bound:
            return ""
        sums = float(a.losses.sum()), float(b.losses.sum())  # as of losses that are sums
        if abs(sums[0] - sums[1]) <= bound * max(len(a.losses), len(b.losses)):
            return ""
        ratio = other / own if own else math.nan
        words = f"The loss of step {number} is {own:.6g} in A and {other:.6g} in B"
        return f"{words} ({times(ratio)}{likely(ratio, self._sides)})" if ratio > 0 else words

    def _gradient(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        found = self._apart(number, GRADIENT, a, b)
        seen = all(step.facts.get("clipping seen") for step in (a, b))
        before = self._apart(number, UNCLIPPED, self._unscaled(a), self._unscaled(b))
        if not found:
            if seen and before:
                self._note("Clipping hides it from the optimizer.")
                return self._different(
                    number, Stage.GRADIENT, before, "the gradient before clipping differs"
                )
            return None
        names = {each.name for each in found}
        known = all(step.figures.get(UNCLIPPED) for step in (a, b))
        equal_before = known and not names & {each.name for each in before}
        if equal_before and (is_clipped(a) or is_clipped(b)):
            for side, step in zip(self._sides, (a, b), strict=True):
                self._note(_clipping_words(side.name, step))
            return self._different(
                number,
                Stage.CLIPPING,
                found,
                "the clipped gradient differs, and the gradient before clipping does not",
            )
        if known and before and len(before) < len(found) and (is_clipped(a) or is_clipped(b)):
            self._note(f"Clipping by the norm of all then changes {len(found)} parameters.")
            return self._different(
                number, Stage.GRADIENT, before, "the gradient before clipping differs"
            )
        factors = [step.multipliers for step in (a, b)]
        if all(len(each) for each in factors):
            own, other = (float(each.mean()) for each in factors)
            if own and other and abs(other * self._b.passes / (own * self._a.passes) - 1) > 0.01:
                self._note(
                    f"backward was called on {own:.4g} × the loss in A, and {other:.4g} × in B."
                )
        if equal_before:
            self._note("It changes between the backward pass and the optimizer's call.")
        return self._different(number, Stage.GRADIENT, found, "the gradient differs")

    def _update(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        found = self._apart(number, UPDATE, a, b)
        if not found:
            self._note_lost(a, b)
            return None
        words = _counters_apart(a.counters, b.counters)
        if words:
            self._note(f"{words[0].upper()}{words[1:]}.")
        settings = _settings_apart(a, b)
        if settings:
            self._other_settings = True
            self._note(settings)
        return self._different(
            number, Stage.UPDATE, found, "the update differs, and the gradient does not"
        )

    def _note_lost(self, a: SideStep, b: SideStep) -> None:
        """Note updates that a side's type rounds away altogether."""
        pairs = _both(a, b, UPDATE)
        for side, lost in (
            (self._a, [name for name, own, other in pairs if not own.norm and other.norm]),
            (self._b, [name for name, own, other in pairs if own.norm and not other.norm]),
        ):
            if lost and not any(note.startswith("Rounding") for note in self._notes):
                self._note(
                    f"Rounding to the type of {side.name}'s parameters loses the whole update of "
                    f"{first_of(lost)}."
                )

    def _state(self, number: int, a: SideStep, b: SideStep) -> Answer | None:
        for kind in self._moments(MOMENT, a, b):
            found = self._apart(number, kind, a, b)
            if found:
                name = kind.removeprefix(MOMENT)
                return self._different(
                    number,
                    Stage.STATE,
                    found,
                    f"the optimizer's {name} differs, and the update does not",
                )
        words = _counters_apart(a.counters, b.counters)
        if words:
            return self._made(Kind.DIFFERENT, f"In step {number} {words}.", number, Stage.STATE)
        return None

    def _moments(self, prefix: str, a: SideStep, b: SideStep) -> list[str]:
        """Return the kinds of moments, without those that a side holds as whole numbers or bits."""
        kinds = sorted({k for step in (a, b) for k in step.figures if k.startswith(prefix)})
        others = {
            prefix + name: f"The optimizer's {name} is {dtype} in {side.name}: it is not compared."
            for side, step in zip(self._sides, (a, b), strict=True)
            for name, dtype in dict(step.facts.get("moments not measured", {})).items()
        }
        for kind in kinds:
            self._note(others.get(kind, ""))
        return [kind for kind in kinds if kind not in others]

    def _unequal(self, number: int, a: SideStep, b: SideStep, *kinds: str) -> Answer | None:
        """Return that copies on ranks of one side differ."""
        least = max(1e-4, 32 * self._bounds.roundoff)
        for kind in kinds:
            for side, step in zip(self._sides, (a, b), strict=True):
                there = [
                    each for each in step.unequal if each.kind == kind and each.relative > least
                ]
                if not there:
                    continue
                ranks = sorted({rank for each in there for rank in each.ranks})
                what = {START: "parameters", GRADIENT: "gradients", UPDATE: "updates"}[kind]
                shown = first_of([each.name for each in there])
                several = len(ranks) > 1
                who = f"rank{'s' if several else ''} {', '.join(map(str, ranks))}"
                verb = "hold" if several else "holds"
                text = (
                    f"In step {number} of {side.name}, {who} {verb} other {what} than rank 0: "
                    f"{shown}"
                )
                differences = tuple(
                    Difference(each.name, each.relative, least, math.nan, math.nan, "copies differ")
                    for each in there
                )
                return self._made(Kind.DIFFERENT, f"{text}.", number, _STAGE_OF[kind], differences)
        return None

    def _inside(self, number: int, a: SideStep, b: SideStep) -> tuple[str, ...]:
        """Return sentences on the first layer that computes something else; none unless recorded.

        The gradient of the last layer's output shows what the loss is multiplied by: its factor is
        taken out of all others.
        """
        shapes = [step.facts.get("outputs") for step in (a, b)]
        if shapes[0] is None or shapes[1] is None:
            return ()
        names = [
            name for name, shape in shapes[0].items() if shape and shapes[1].get(name) == shape
        ]
        others = [name for name in dict.fromkeys([*shapes[0], *shapes[1]]) if name not in names]
        left_out = (f"Outputs that cannot be compared: {first_of(others)}.",) if others else ()
        for kind, order in ((OUTPUT, names), (OUTPUT_GRADIENT, names[::-1])):
            own, other = a.figures.get(kind, {}), b.figures.get(kind, {})
            scale = math.nan
            for name in (each for each in order if each in own and each in other):
                if kind == OUTPUT or math.isnan(scale):
                    scale = 1.0 if kind == OUTPUT else _scale(own[name], other[name])
                second = other[name].times(1 / scale)
                bound = self._bounds.of(number, kind, name, own[name], second)
                if distance(own[name], second) > bound:
                    look = describe(name, own[name], second, bound).look
                    what = "output" if kind == OUTPUT else "gradient of an output"
                    where = "forward" if kind == OUTPUT else "backward"
                    return (f"The first {what} that differs in the {where} pass is that of {name}: "
                            f"{look}.", *left_out)  # fmt: skip
        return (
            "No layer's output differs, nor the gradient of one, but for a factor of all: see the "
            "loss's scale, and how gradients are added up and reduced.",
            *left_out,
        )

    # Parts -----------------------------------------------------------------------------------

    def _apart(
        self, number: int, kind: str, a: SideStep, b: SideStep, *, start: bool = False
    ) -> list[Difference]:
        """Return the tensors of a kind that differ by more than rounding explains."""
        found = []
        both = _both(a, b, kind)
        self._compared = max(len(both), 1)
        for name, first, second in both:
            norm = max(first.norm, second.norm)
            bound = (
                self._bounds.of_start(norm)
                if start
                else self._bounds.of(number, kind, name, first, second)
            )
            within = self._distance(kind, name, first, second) <= bound
            if not within or (not start and self._has_factor(number, kind, name, first, second)):
                found.append(describe(name, first, second, bound))
        return sorted(found, key=_beyond, reverse=True)

    def _has_factor(self, number: int, kind: str, name: str, first: Whole, second: Whole) -> bool:
        """Return whether a factor is seen in what rounding has changed a lot."""
        norm = max(first.norm, second.norm)
        if kind in (START, BUFFER) or not norm > 0:
            return False
        if self._bounds.of(number, kind, name, first, second) < _MUCH * norm:
            return False
        return abs(factor(first, second) - 1) > self._bounds.of_factor(number, kind, name)

    def _distance(self, kind: str, name: str, first: Whole, second: Whole) -> float:
        if kind == UPDATE:
            return spread_distance(first, second, math.prod(self._a.shapes.get(name, (1,))))
        return distance(first, second)

    def _unscaled(self, step: SideStep) -> SideStep:
        """Return a step without the factor of a gradient scaler, which is a large power of two."""
        before, after = step.figures.get(UNCLIPPED, {}), step.figures.get(GRADIENT, {})
        norms = [math.sqrt(sum(w.norm**2 for w in each.values())) for each in (before, after)]
        if not all(norms):
            return step
        scale = norms[0] / norms[1]
        exponent = math.log2(scale) if math.isfinite(scale) and scale > 0 else 0.0
        if scale < _LEAST_SCALER or abs(exponent - round(exponent)) > 1e-4:
            return step
        return SideStep(figures={**step.figures, UNCLIPPED: after}, facts=step.facts)

    def _drew(self) -> str:
        layers = [*self._a.drew, *self._b.drew]
        shown = first_of(list(dict.fromkeys(layers))) if layers else "the model"
        return (
            f"random numbers are drawn inside the forward pass ({shown}), which differ between "
            "layouts; use --no-dropout"
        )

    def _note(self, text: str) -> None:
        if text and text not in self._notes and len(self._notes) < _MOST_NOTES:
            self._notes.append(text)

    def _different(
        self,
        number: int,
        stage: Stage,
        found: Sequence[Difference],
        words: str,
        what: str = "parameter",
    ) -> Answer:
        looks = Counter(each.look for each in found)
        common, count = looks.most_common(1)[0]
        compared = max(self._compared, len(found))
        if len(found) == compared and compared > 1:
            which = f"all {compared} {what}s"
        else:
            which = first_of([each.name for each in found])
        if common == NOT_FINITE and count == len(found):
            text = f"Not comparable: in step {number} the {stage} is not finite in both: {which}."
            return self._made(Kind.NOT_COMPARABLE, text, number, None, tuple(found), compared)
        look = common if count == len(found) else _range_of_looks(found, common, count)
        if len(found) == compared and count == len(found):
            look += likely(found[0].factor, self._sides)
        text = f"In step {number} {words}: {which}, {look}."
        return self._made(Kind.DIFFERENT, text, number, stage, tuple(found), compared)

    def _made(
        self,
        kind: Kind,
        headline: str,
        step: int,
        stage: Stage | None = None,
        differences: tuple[Difference, ...] = (),
        compared: int = 0,
    ) -> Answer:
        steps = sorted(set(self._a.steps) & set(self._b.steps))
        number = step if stage is not None else -1
        through = [s for s in steps if stage is None or s <= step]
        skip = stage in (Stage.START, Stage.SAMPLES, Stage.LABELS)
        return Answer(
            kind,
            headline,
            stage,
            number,
            differences,
            compared,
            tuple(self._notes),
            {} if skip else self._could_miss(steps[0]),
            {} if skip else self._curves(through),
            len(through),
            self._class_of(kind, stage),
        )

    def _class_of(self, kind: Kind, stage: Stage | None) -> DiffClass | None:
        if kind is Kind.NOT_COMPARABLE:
            return None
        if stage is None:
            return DiffClass.ROUNDING
        if self._other_settings:
            return DiffClass.CONFIGURATION
        return CLASS_OF.get(stage, DiffClass.JUMP)

    def _could_miss(self, number: int) -> dict[str, tuple[float, float]]:
        a, b = self._a.steps[number], self._b.steps[number]
        found = {}
        for kind in (GRADIENT, UPDATE):
            shares = sorted(
                self._bounds.of(number, kind, name, first, second) / norm
                for name, first, second in _both(a, b, kind)
                if (norm := max(first.norm, second.norm)) > 0 and math.isfinite(norm)
            )
            if shares:
                found[kind] = (shares[len(shares) // 2], shares[-1])
        return found

    def _curves(self, steps: Sequence[int]) -> dict[str, tuple[float, ...]]:
        values: dict[str, list[float]] = {}
        for place, number in enumerate(steps):
            for kind in (GRADIENT, UPDATE):
                for name, first, second in _both(
                    self._a.steps[number], self._b.steps[number], kind
                ):
                    row = values.setdefault(name, [0.0] * len(steps))
                    bound = self._bounds.of(number, kind, name, first, second)
                    apart = self._distance(kind, name, first, second)
                    ratio = apart / bound if bound > 0 else (math.inf if apart else 0.0)
                    row[place] = max(row[place], ratio)
        return {name: tuple(row) for name, row in values.items()}


def _scale(first: Whole, second: Whole) -> float:
    """Return the factor between two gradients, 1 if they do not have the same direction."""
    found = factor(first, second)
    rest = distance(second, first.times(found)) if math.isfinite(found) else math.inf
    return found if found and rest < _MUCH * second.norm else 1.0


def _has_same_generators(own: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(own[name] == other.get(name) for name in own if name in _GENERATORS)


def _both(a: SideStep, b: SideStep, kind: str) -> list[tuple[str, Whole, Whole]]:
    """Return the figures of each tensor that a side has; a tensor of zeros where one has none."""
    own, other = a.figures.get(kind, {}), b.figures.get(kind, {})
    zero = Whole(np.zeros(QUARTERS), np.zeros((QUARTERS, WIDTH)))
    names = dict.fromkeys([*own, *other])
    return [(name, own.get(name, zero), other.get(name, zero)) for name in names]


def _beyond(each: Difference) -> float:
    if math.isnan(each.distance):
        return math.inf
    return each.distance / each.bound if each.bound > 0 else math.inf


def _range_of_looks(found: Sequence[Difference], common: str, count: int) -> str:
    if count > len(found) / 2:
        return f"most of them {common}"
    if all(each.look.startswith("×") for each in found):
        factors = [each.factor for each in found]
        return f"× {min(factors):.3g} to {max(factors):.3g}"
    return f"the first one {found[0].look}"


def _clipping_words(name: str, step: SideStep) -> str:
    norms = [
        math.sqrt(sum(whole.norm**2 for whole in step.figures.get(kind, {}).values()))
        for kind in (UNCLIPPED, GRADIENT)
    ]
    return f"{name} clips a norm of {norms[0]:.4g} to {norms[1]:.4g}."


def _counters_apart(own: Mapping[str, float], other: Mapping[str, float]) -> str:
    names = [
        name for name in dict.fromkeys([*own, *other]) if own.get(name, 0) != other.get(name, 0)
    ]
    if not names:
        return ""
    first, second = own.get(names[0], 0), other.get(names[0], 0)
    which = "" if len(names) == len({*own, *other}) else f" of {first_of(names)}"
    return f"the optimizer's step counter{which} is {first:g} in A and {second:g} in B"


def _settings_apart(a: SideStep, b: SideStep) -> str:
    groups = [list(step.facts.get("settings", ())) for step in (a, b)]
    if len(groups[0]) != len(groups[1]):
        return (
            f"The optimizer has {len(groups[0])} parameter groups in A and {len(groups[1])} in B."
        )
    for own, other in zip(*groups, strict=True):
        for name in dict.fromkeys([*own, *other]):
            if own.get(name) != other.get(name):
                return f"{name} is {own.get(name)} in A and {other.get(name)} in B."
    return ""
