"""Compares two recorded trainings: the first thing that differs, in the order of causes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rankscope.bus.parity import GRADIENT, START, UPDATE
from rankscope.bus.words import count
from rankscope.tools.parity.pair import Notes, StepPair, both, not_comparable
from rankscope.tools.parity.reading import (
    Bounds,
    Recording,
    distance,
    identical,
    joined,
    part_of,
    trained,
)
from rankscope.tools.parity.result import Answer, Kind
from rankscope.tools.parity.stages import STAGES, drew
from rankscope.tools.stages import CLASS_OF, DiffClass, Stage

_SAME_START = 1e-5


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
        return not_comparable(f"{why}.")
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
    if any(Counter(own.samples.tolist()) != Counter(more.samples.tolist()) for own, more in pairs):
        return f"{side.name} draws other samples each time it runs: give its data loader a seed"
    from_the_start = steps[:1] == [min(again.steps)]  # not of a resumption
    if from_the_start and not all(
        distance(own, other) <= _SAME_START * max(own.norm, other.norm)
        for _, own, other in both(*pairs[0], START)
    ):
        return (
            f"{side.name} begins with other parameters each time it runs: give it a seed, or use "
            "--same-start"
        )
    return ""


def compare(bounds: Bounds) -> Answer:
    """Return the answer for two recorded trainings, by the steps that both have."""
    why = why_not_comparable(bounds.a, bounds.b)
    if why:
        return not_comparable(f"{why}.")
    notes = Notes()
    pairs = [StepPair(number, bounds, notes) for number in bounds.steps]
    found = (stage(pair) for pair in pairs for stage in STAGES)
    answer = next((each for each in found if each is not None), None) or _same(pairs)
    through = [pair for pair in pairs if answer.stage is None or pair.number <= answer.step]
    answer = replace(
        answer,
        notes=(*answer.notes, *notes),
        num_steps=len(through),
        difference=_class_of(answer),
    )
    if answer.stage in (Stage.START, Stage.SAMPLES, Stage.LABELS):
        return answer  # by what was not computed
    return replace(answer, could_miss=pairs[0].could_miss(), curves=_curves(through))


def _same(pairs: Sequence[StepPair]) -> Answer:
    """Return the answer for steps in which nothing differs, as far as it was recorded."""
    for pair in pairs:
        for side, step in zip(pair.sides, (pair.a, pair.b), strict=True):
            missing = [kind for kind in (GRADIENT, UPDATE) if not step.figures.get(kind)]
            if missing:
                what = f"no {' and no '.join(missing)} of {side.name} was recorded"
                return not_comparable(f"{what} in step {pair.number}.")
    others = {
        str(name)
        for side in pairs[0].sides
        for step in side.steps.values()
        for name in step.facts.get("others", ())
    }
    if others:
        return not_comparable(
            "another model is trained beside the one that was compared, which is the same; "
            f"its optimizer is {' and '.join(sorted(others))}."
        )
    if any(pair.may_draw_otherwise for pair in pairs):
        pairs[0].notes.add(drew(pairs[0]))
    plural = "s" if len(pairs) != 1 else ""
    return Answer(Kind.SAME, f"The same within rounding, over {len(pairs)} step{plural}.")


def _class_of(answer: Answer) -> DiffClass | None:
    if answer.kind is Kind.NOT_COMPARABLE:
        return None
    if answer.stage is None:
        return DiffClass.ROUNDING
    return answer.difference or CLASS_OF.get(answer.stage, DiffClass.JUMP)


def _curves(pairs: Sequence[StepPair]) -> dict[str, tuple[float, ...]]:
    """Return distance over bound of each tensor in each step."""
    rows = [pair.distances_over_bounds() for pair in pairs]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: tuple(row.get(name, 0.0) for row in rows) for name in names}


def why_not_comparable(a: Recording, b: Recording) -> str:
    """Return why two trainings cannot be compared, empty if they can."""
    alone = [sorted(own) for own in (trained(a) - trained(b), trained(b) - trained(a))]
    if any(alone):
        in_a, in_b = map(_shown, alone)
        if in_a and in_b:
            return f"A alone trains {in_a}, and B alone {in_b}; see --map"
        return f"{'A' if in_a else 'B'} alone trains {in_a or in_b}"
    shapes = [n for n in trained(a) if n in a.shapes and a.shapes[n] != b.shapes.get(n)]
    if shapes:
        name = shapes[0]
        sizes = f"{_size(a.shapes[name])} in A and {_size(b.shapes.get(name, ()))} in B"
        return (
            f"{name} is {sizes}; parts of a parameter count as one where they are DTensors, as "
            "parallelize_module makes them"
        )
    if not set(a.steps) & set(b.steps):
        return "they have no step in common"
    return ""


def _shown(names: Sequence[str]) -> str:
    """Return a number of parameters and the first of them; empty without one."""
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{count(len(names), 'parameter')} ({some})" if names else ""


def _size(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a number"
