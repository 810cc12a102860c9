"""The first layer that computes something else."""

import math

from rankscope.bus.parity import OUTPUT, OUTPUT_GRADIENT
from rankscope.bus.words import first_of
from rankscope.tools.parity.pair import MUCH, StepPair
from rankscope.tools.parity.reading import Whole, distance, factor
from rankscope.tools.parity.result import describe


def first_layer_apart(pair: StepPair) -> tuple[str, ...]:
    """Return sentences on the first layer that computes something else; none unless recorded.

    The gradient of the last layer's output shows what the loss is multiplied by: its factor is
    taken out of all others.
    """
    own_shapes, other_shapes = (step.facts.get("outputs") for step in (pair.a, pair.b))
    if own_shapes is None or other_shapes is None:
        return ()
    names = [
        name for name, shape in own_shapes.items() if shape and other_shapes.get(name) == shape
    ]
    others = [name for name in dict.fromkeys([*own_shapes, *other_shapes]) if name not in names]
    left_out = (f"Outputs that cannot be compared: {first_of(others)}.",) if others else ()
    found = _first_apart(pair, OUTPUT, names) or _first_apart(pair, OUTPUT_GRADIENT, names[::-1])
    return (
        found
        or "No layer's output differs, nor the gradient of one, but for a factor of all: see the "
        "loss's scale, and how gradients are added up and reduced.",
        *left_out,
    )


def _first_apart(pair: StepPair, kind: str, names: list[str]) -> str:
    own, other = pair.a.figures.get(kind, {}), pair.b.figures.get(kind, {})
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
