"""A resumed training beside one that went on: what it starts with is what the other one held."""

from collections.abc import Mapping
from dataclasses import replace

from rankscope.bus.parity import HELD, MOMENT
from rankscope.tools.parity.reading import Recording, SideStep


def part_of(side: Recording, first: int, stop: int) -> Recording:
    """Return the steps ``[first, stop)`` of a side."""
    return replace(side, steps={n: s for n, s in side.steps.items() if first <= n < stop})


def joined(whole: Recording, resumed: Recording, at: int) -> tuple[Recording, Recording]:
    """Return both sides from the resumption on.

    What the whole training's optimizer held after the step before stands as what it held before
    the first one, to be compared with the resumed one's.

    Args:
        whole: The training that went on.
        resumed: The resumed one, whose first step is ``at``.
        at: Step of the resumption.
    """
    later = part_of(whole, at, max(whole.steps) + 1)
    before = whole.steps[at - 1]
    moments = {
        HELD + kind.removeprefix(MOMENT): figures
        for kind, figures in before.figures.items()
        if kind.startswith(MOMENT)
    }
    first = later.steps[at]
    held = SideStep(
        figures={**first.figures, **moments},
        unequal=first.unequal,
        samples=first.samples,
        sample_ranks=first.sample_ranks,
        labels=first.labels,
        losses=first.losses,
        weights=first.weights,
        multipliers=first.multipliers,
        counters=first.counters,
        facts={**first.facts, "held counters": dict(before.counters), "resumed": True},
        random=first.random,
    )
    names = {**first_facts(whole), **first_facts(resumed)}
    steps = {**later.steps, at: held}
    return _with_names(replace(later, steps=steps), names), resumed


def first_facts(side: Recording) -> Mapping[str, object]:
    """Return what is recorded in a side's first step alone."""
    facts = side.steps[min(side.steps)].facts
    return {name: facts[name] for name in ("trained", "shapes", "types") if name in facts}


def _with_names(side: Recording, names: Mapping[str, object]) -> Recording:
    first = side.steps[min(side.steps)]
    first.facts = {**names, **first.facts}
    return side
