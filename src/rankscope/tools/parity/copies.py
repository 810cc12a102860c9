"""Copies of a tensor that differ between the ranks of one side."""

import math
from dataclasses import replace

from rankscope.bus.parity import GRADIENT, START, UPDATE
from rankscope.bus.words import first_of
from rankscope.tools.parity.pair import StepPair
from rankscope.tools.parity.result import Answer, Difference
from rankscope.tools.stages import Stage

_STAGES = {
    START: (Stage.START, "parameters"),
    GRADIENT: (Stage.GRADIENT, "gradients"),
    UPDATE: (Stage.UPDATE, "updates"),
}


def unequal_copies(pair: StepPair, *kinds: str) -> Answer | None:
    """Return that copies on ranks of one side differ."""
    least = max(1e-4, 32 * pair.bounds.roundoff)
    for kind in kinds:
        stage, what = _STAGES[kind]
        for side, step in zip(pair.sides, (pair.a, pair.b), strict=True):
            there = [each for each in step.unequal if each.kind == kind and each.relative > least]
            if not there:
                continue
            ranks = sorted({rank for each in there for rank in each.ranks})
            who, verb = ("ranks", "hold") if len(ranks) > 1 else ("rank", "holds")
            answer = pair.differ_by(
                stage,
                f"In step {pair.number} of {side.name}, {who} {', '.join(map(str, ranks))} {verb} "
                f"other {what} than rank 0: {first_of([each.name for each in there])}.",
            )
            differences = tuple(
                Difference(each.name, each.relative, least, math.nan, math.nan, "copies differ")
                for each in there
            )
            return replace(answer, differences=differences)
    return None
