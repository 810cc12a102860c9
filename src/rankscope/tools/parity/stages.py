"""The stages of a step, each a function that returns how two trainings differ in it, if they do."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rankscope.bus.parity import (
    BUFFER,
    GRADIENT,
    HELD,
    MOMENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    START,
    UNCLIPPED,
    UPDATE,
)
from rankscope.bus.words import first_of
from rankscope.tools.parity.data import data, losses_apart, samples_apart
from rankscope.tools.parity.pair import (
    MUCH,
    StepPair,
    both,
    has_same_generators,
    not_comparable,
    unequal_copies,
)
from rankscope.tools.parity.reading import SideStep, Whole, distance, factor, is_clipped, trained
from rankscope.tools.parity.result import Answer, Difference, describe, ratio_of
from rankscope.tools.stages import DiffClass, Stage

_SETTING = 1e-6  # relative error of a setting that one side holds in float32


def start(pair: StepPair) -> Answer | None:
    """Compare parameters and buffers as the first step begins."""
    if not pair.is_first:
        return None
    resumed = bool(pair.a.facts.get("resumed"))
    words = "it resumes with others" if resumed else "the start differs"
    for kind, what in ((START, "parameter"), (BUFFER, "buffer")):
        found = pair.apart(kind, start=not resumed)
        if found:
            return pair.differ(Stage.START, words, found, pair.count(kind), what)
    return None


def held_before(pair: StepPair) -> Answer | None:
    """Compare what the optimizers hold before their first call."""
    if not pair.is_first:
        return None
    for kind in _moments(pair, HELD):
        found = pair.apart(kind, start=kind not in pair.a.figures)
        if found:
            words = f"the optimizer holds another {kind.removeprefix(HELD)} before its first call"
            return pair.differ(Stage.STATE, words, found, pair.count(kind))
    own, other = (dict(step.facts.get("held counters", {})) for step in (pair.a, pair.b))
    words = _counters_apart(own, other)
    return pair.differ_by(Stage.STATE, f"Before its first call {words}.") if words else None


def restored(pair: StepPair) -> Answer | None:
    """Compare gradient scaler and random generators as a resumption begins."""
    if not pair.is_first or not pair.a.facts.get("resumed"):
        return None
    return _scaler(pair) or _random(pair)


def _scaler(pair: StepPair) -> Answer | None:
    own, other = (dict(step.facts.get("scaler", {})) for step in (pair.a, pair.b))
    for name in dict.fromkeys([*own, *other]):
        first = own.get(name, "none")
        second = other.get(name, "none")
        if first != second:
            text = (
                f"In step {pair.number} the gradient scaler is not restored: its "
                f"{name.strip('_').replace('_', ' ')} is {first} in A and {second} in B."
            )
            return pair.differ_by(Stage.STATE, text)
    return None


def _random(pair: StepPair) -> Answer | None:
    """Compare the random generators rank by rank: of a resumption in the same layout."""
    own = pair.a.random
    other = pair.b.random
    if set(own) != set(other):
        return None
    ranks = [rank for rank in own if not has_same_generators(own[rank], other[rank])]
    if not ranks:
        return None
    owners = {
        rank: next((r for r in own if has_same_generators(own[r], other[rank])), -1)
        for rank in ranks
    }
    swapped = sorted(owners.values()) == sorted(ranks)
    held = [
        f"rank {rank} holds {'another one' if owner < 0 else f'that of rank {owner}'}"
        for rank, owner in list(owners.items())[:3]
    ]
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    state = "restored to other ranks, by a permutation" if swapped else "not restored"
    text = f"The random state of step {pair.number} is {state}: {'; '.join(held)}{more}."
    if any(side.drawn for side in pair.sides):
        pair.notes.add(samples_apart(pair))
        return pair.differ_by(Stage.RANDOM, text)
    pair.notes.add(f"{text} No random numbers are drawn inside the forward pass.")
    return None


def not_updated(pair: StepPair) -> Answer | None:
    """Compare at a later start what no optimizer was seen to update.

    Such are a teacher's parameters, and those of an optimizer that torch does not know; and
    buffers, where both sides deal out the batch alike: running statistics are of a part of it.
    """
    if pair.is_first:
        return None
    a, b = pair.sides
    updated = trained(a) & {
        name
        for side in pair.sides
        for step in side.steps.values()
        for name in step.figures.get(UPDATE, ())
    }
    found = [each for each in pair.apart(START) if each.name not in updated]
    if found:
        is_trained = any(each.name in trained(a) for each in found)
        what = "no optimizer of torch's updates" if is_trained else "is not trained"
        compared = len(a.shapes.keys() - updated)
        return pair.differ(Stage.START, f"the start differs in what {what}", found, compared)
    found = pair.apart(BUFFER) if (a.workers, a.passes) == (b.workers, b.passes) else []
    if not found:
        return None
    words = "the start differs in what no optimizer updates"
    return pair.differ(Stage.START, words, found, pair.count(BUFFER), "buffer")


def loss_and_gradient(pair: StepPair) -> Answer | None:
    """Compare losses, gradients and the ranks' copies of gradients and updates."""
    copies = unequal_copies(pair, GRADIENT, UPDATE)
    loss = losses_apart(pair)
    gradient = _gradient(pair)
    if gradient is None and not loss:
        return copies
    if gradient is None and copies is None:
        pair.notes.add(f"{loss}; its gradient is the same.")
        return None
    if pair.may_draw_otherwise:
        return not_comparable(drew(pair))
    inside = first_layer_apart(pair)
    if gradient is None or loss:
        return replace(pair.differ_by(Stage.LOSS, f"{loss}."), notes=inside)
    if copies is not None and copies.stage is gradient.stage:
        inside = (copies.headline, *inside)
    return replace(gradient, notes=inside)


def _gradient(pair: StepPair) -> Answer | None:
    """Compare the gradients that the optimizers get, and those before clipping."""
    steps = (pair.a, pair.b)
    found = pair.apart(GRADIENT)
    before = pair.apart(UNCLIPPED)
    clips = any(map(is_clipped, steps))
    if before and not found and all(step.facts.get("clipping seen") for step in steps):
        pair.notes.add("Clipping hides it from the optimizer.")
        return _before_clipping(pair, before)
    if not found:
        return None
    known = all(step.figures.get(UNCLIPPED) for step in steps)
    if known and not {each.name for each in found} & {each.name for each in before}:
        return _after_backward(pair, found, clips=clips)
    if known and before and len(before) < len(found) and clips:
        pair.notes.add(f"Clipping by the norm of all then changes {len(found)} parameters.")
        return _before_clipping(pair, before)
    _note_multipliers(pair)
    return pair.differ(Stage.GRADIENT, "the gradient differs", found, pair.count(GRADIENT))


def _before_clipping(pair: StepPair, found: list[Difference]) -> Answer:
    words = "the gradient before clipping differs"
    return pair.differ(Stage.GRADIENT, words, found, pair.count(UNCLIPPED))


def _after_backward(pair: StepPair, found: list[Difference], *, clips: bool) -> Answer:
    """Return the answer for gradients that agree after the backward pass, and not as given.

    Code that clips by itself is not seen to clip. A factor that is a ratio of workers or
    micro-batches is no clipping.
    """
    seen = any(step.facts.get("clipping seen") for step in (pair.a, pair.b))
    for side, step in zip(pair.sides, (pair.a, pair.b), strict=True):
        first, last = (_norm(step, kind) for kind in (UNCLIPPED, GRADIENT))
        pair.notes.add(
            f"{side.name} clips a norm of {first:.4g} to {last:.4g}."
            if seen and is_clipped(step)
            else f"{side.name}'s norm is {first:.4g} after the backward pass, and {last:.4g} as "
            "the optimizer is called."
        )
    if seen:
        words = "the clipped gradient differs, and the gradient before clipping does not"
        return pair.differ(Stage.CLIPPING, words, found, pair.count(GRADIENT))
    words = "the gradient differs, and after the backward pass it does not"
    ratio = ratio_of(found[0].factor, pair.sides)
    stage = Stage.CLIPPING if clips and not ratio else Stage.GRADIENT
    answer = pair.differ(stage, words, found, pair.count(GRADIENT))
    return replace(answer, remedy=_BETWEEN)


_BETWEEN = (
    "Look for what multiplies or clips gradients between the backward pass and the optimizer, such "
    "as the scale_grads of a pipeline's schedule."
)


def _norm(step: SideStep, kind: str) -> float:
    return math.sqrt(sum(whole.norm**2 for whole in step.figures.get(kind, {}).values()))


def _note_multipliers(pair: StepPair) -> None:
    """Note that ``backward`` was called on other multiples of the loss."""
    if not (len(pair.a.multipliers) and len(pair.b.multipliers)):
        return
    own, other = (float(step.multipliers.mean()) for step in (pair.a, pair.b))
    a, b = pair.sides
    if own and other and abs(other * b.passes / (own * a.passes) - 1) > 0.01:
        words = [
            f"{times:.4g} × the loss of "
            f"{'the batch' if side.passes == 1 else f'each of {side.passes} micro-batches'} in "
            f"{side.name}"
            for times, side in ((own, a), (other, b))
        ]
        pair.notes.add(f"backward was called on {words[0]}, and on {words[1]}.")


def update(pair: StepPair) -> Answer | None:
    """Compare updates; settings explain a difference, and step counters are noted."""
    found = pair.apart(UPDATE)
    if not found:
        _note_lost(pair)
        return _other_settings(pair)
    words = _counters_apart(pair.a.counters, pair.b.counters)
    if words:
        pair.notes.add(f"{words[0].upper()}{words[1:]}.")
    settings = _settings_apart(pair.a, pair.b)
    words = "the update differs, and the gradient does not"
    answer = pair.differ(Stage.UPDATE, words, found, pair.count(UPDATE))
    if not settings:
        return answer
    return replace(answer, difference=DiffClass.CONFIGURATION, cause=settings)


def _other_settings(pair: StepPair) -> Answer | None:
    """Return the answer where settings differ, whose effect is within the bound of one update."""
    words = _numbers_apart(pair.a, pair.b)
    if not words:
        return None
    answer = pair.differ_by(Stage.UPDATE, f"In step {pair.number} {words}")
    return replace(answer, difference=DiffClass.CONFIGURATION, cause=words)


def _note_lost(pair: StepPair) -> None:
    """Note updates that a side's type rounds away altogether."""
    pairs = both(pair.a, pair.b, UPDATE)
    a, b = pair.sides
    for side, lost in (
        (a, [name for name, own, other in pairs if not own.norm and other.norm]),
        (b, [name for name, own, other in pairs if own.norm and not other.norm]),
    ):
        if lost:
            pair.notes.add(
                f"Rounding to the type of {side.name}'s parameters loses the whole update of "
                f"{first_of(lost)}.",
                unless="Rounding",
            )


def state(pair: StepPair) -> Answer | None:
    """Compare the optimizers' moments and step counters after the update."""
    for kind in _moments(pair, MOMENT):
        found = pair.apart(kind)
        if found:
            name = kind.removeprefix(MOMENT)
            words = f"the optimizer's {name} differs, and the update does not"
            return pair.differ(Stage.STATE, words, found, pair.count(kind))
    words = _counters_apart(pair.a.counters, pair.b.counters)
    return pair.differ_by(Stage.STATE, f"In step {pair.number} {words}.") if words else None


def _moments(pair: StepPair, prefix: str) -> list[str]:
    """Return the kinds of moments, without those that a side holds as whole numbers or bits."""
    steps = (pair.a, pair.b)
    kinds = sorted({kind for step in steps for kind in step.figures if kind.startswith(prefix)})
    others = {
        prefix + name: f"The optimizer's {name} is {dtype} in {side.name}: it is not compared."
        for side, step in zip(pair.sides, steps, strict=True)
        for name, dtype in dict(step.facts.get("moments not measured", {})).items()
    }
    for kind in kinds:
        pair.notes.add(others.get(kind, ""))
    return [kind for kind in kinds if kind not in others]


STAGES: tuple[Callable[[StepPair], Answer | None], ...] = (
    start,
    held_before,
    restored,
    lambda pair: unequal_copies(pair, START),
    not_updated,
    data,
    loss_and_gradient,
    update,
    state,
)
"""In the order of causes: the first that differs decides."""


def drew(pair: StepPair) -> str:
    """Return the clause on random numbers in the forward pass."""
    layers = [name for side in pair.sides for name in side.drew]
    shown = first_of(list(dict.fromkeys(layers))) if layers else "the model"
    return (
        f"random numbers are drawn inside the forward pass ({shown}), which differ between "
        "layouts; use --no-dropout, where a side is recorded as well (rankscope run --parity N "
        "--no-dropout)"
    )


def _counters_apart(own: Mapping[str, float], other: Mapping[str, float]) -> str:
    names = [
        name for name in dict.fromkeys([*own, *other]) if own.get(name, 0) != other.get(name, 0)
    ]
    if not names:
        return ""
    first = own.get(names[0], 0)
    second = other.get(names[0], 0)
    which = "" if len(names) == len({*own, *other}) else f" of {first_of(names)}"
    return f"the optimizer's step counter{which} is {first:g} in A and {second:g} in B"


def _settings(a: SideStep, b: SideStep) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting's name and its values in both, group by group; None where it is absent."""
    groups = [step.facts.get("settings", ()) for step in (a, b)]
    for own, other in zip(*groups, strict=False):
        for name in dict.fromkeys([*own, *other]):
            yield name, own.get(name), other.get(name)


def _settings_apart(a: SideStep, b: SideStep) -> str:
    own, other = (len(step.facts.get("settings", ())) for step in (a, b))
    if own != other:
        return f"The optimizer has {own} parameter groups in A and {other} in B."
    for name, value, another in _settings(a, b):
        if value != another:
            return f"{name} is {value} in A and {another} in B."
    return ""


def _numbers_apart(a: SideStep, b: SideStep) -> str:
    """Return which number both optimizers have in each group, and have another value of."""
    if len(a.facts.get("settings", ())) != len(b.facts.get("settings", ())):
        return ""
    for name, value, another in _settings(a, b):
        own = _numbers(value)
        other = _numbers(another)
        if not own or len(own) != len(other):
            continue
        if any(not math.isclose(*both, rel_tol=_SETTING) for both in zip(own, other, strict=True)):
            return f"{name} is {_shown(own)} in A and {_shown(other)} in B."
    return ""


def _shown(numbers: list[float]) -> str:
    words = ", ".join(f"{number:.6g}" for number in numbers)
    return words if len(numbers) == 1 else f"({words})"


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a setting, such as one or a pair; none of another kind."""
    values = value if isinstance(value, list | tuple) else [value]
    return list(values) if all(isinstance(each, int | float) for each in values) else []


def first_layer_apart(pair: StepPair) -> tuple[str, ...]:
    """Return sentences on the first layer that computes something else; none unless recorded.

    The gradient of the last layer's output shows what the loss is multiplied by: its factor is
    taken out of all others.
    """
    own_shapes, other_shapes = (step.facts.get("outputs") for step in (pair.a, pair.b))
    if own_shapes is None or other_shapes is None:
        without = pair.sides[own_shapes is not None].name
        alone = own_shapes is not other_shapes
        return (f"Layers were not recorded in {without}: give its command.",) * alone
    names = [
        name for name, shape in own_shapes.items() if shape and other_shapes.get(name) == shape
    ]
    others = [name for name in dict.fromkeys([*own_shapes, *other_shapes]) if name not in names]
    left_out = (f"Outputs that cannot be compared: {first_of(others)}.",) if others else ()
    if not names:
        return (f"No layer's output can be compared: {first_of(others)}.",) if others else ()
    found = _first_apart(pair, OUTPUT, names) or _first_apart(pair, OUTPUT_GRADIENT, names[::-1])
    return (
        found
        or ("No other layer's output" if others else "No layer's output")
        + " differs, nor the "
        "gradient of one, but for a factor of all: see the loss's scale, and how gradients are "
        "added up and reduced.",
        *left_out,
    )


def _first_apart(pair: StepPair, kind: str, names: list[str]) -> str:
    own = pair.a.figures.get(kind, {})
    other = pair.b.figures.get(kind, {})
    what, where = ("output", "forward") if kind == OUTPUT else ("gradient of an output", "backward")
    scale = 1.0 if kind == OUTPUT else math.nan
    for name in (each for each in names if each in own and each in other):
        first = own[name]
        scale = _scale(first, other[name]) if math.isnan(scale) else scale
        second = other[name].times(1 / scale)
        bound = pair.bounds.of(pair.number, kind, name, first, second)
        if distance(first, second) > bound:
            look = describe(name, first, second, bound).look
            return f"The first {what} that differs in the {where} pass is that of {name}: {look}."
    return ""


def _scale(first: Whole, second: Whole) -> float:
    """Return the factor between two gradients, 1 if they do not have the same direction."""
    found = factor(first, second)
    rest = distance(second, first.times(found)) if math.isfinite(found) else math.inf
    return found if found and rest < MUCH * second.norm else 1.0
