"""Two runs compared: where they first part, by how much, and whether rounding explains it."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rankscope import Run
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.tools.diff.classes import DifferenceCase, different, identical
from rankscope.tools.diff.parting import CURVES, Pair, curves_of, first_parting, growth_of
from rankscope.tools.diff.reading import (
    DiffSide,
    align,
    changes_between,
    check_models,
    layouts_differ,
    precision_change,
    types_of,
)
from rankscope.tools.diff.result import (
    Alignment,
    Change,
    Comparison,
    Curve,
    DifferenceGrowth,
    Jump,
    Parting,
)
from rankscope.tools.parity.compare import compare
from rankscope.tools.parity.reading import Bounds, NotRecordedError, read_side
from rankscope.tools.stages import DiffClass, Stage

__all__ = [
    "Alignment",
    "Change",
    "Comparison",
    "Curve",
    "DiffClass",
    "DifferenceGrowth",
    "Jump",
    "Parting",
    "Stage",
    "compare_runs",
]


def compare_runs(run_a: Run, run_b: Run, *, offset: int | None = None) -> Comparison:
    """Compare two recorded runs of one training, on as many or on other workers.

    Args:
        run_a: An open run.
        run_b: Another one.
        offset: Step of A minus step of B; None: derived from batches and step numbers.

    Returns:
        Where they first part, by how much, how that grows, and its class.

    Raises:
        RunError: A file is damaged, a run is empty, they have no step in common, or they train
            other models.
    """
    a = DiffSide(run_a)
    b = DiffSide(run_b)
    check_models(a, b)
    alignment = align(a, b, offset)
    at_a = int(np.searchsorted(a.steps_T, alignment.steps_a[0]))
    at_b = int(np.searchsorted(b.steps_T, alignment.steps_b[0]))
    precision = precision_change(a, b, at_a, at_b)
    changes = (*precision.changes, *changes_between(a, b))
    of_a, of_b = precision.types
    dtypes = _coarsest([*types_of(a), *of_a]), _coarsest([*types_of(b), *of_b])
    pair = Pair(a, b, alignment, other_types=layouts_differ(a, b, at_a, at_b))
    signals = pair.signals()
    parting = first_parting(pair, signals, _coarsest(dtypes))
    curves = curves_of(pair)
    if parting is None:
        return identical(pair, changes, curves)
    at = int(np.searchsorted(alignment.steps_a, parting.step))
    case = DifferenceCase(pair, signals, parting, at, changes, dtypes)
    grown = [growth_of(curve) for name in CURVES for curve in curves if curve.name == name]
    growth = next((growth for growth in grown if growth is not None), None)
    found = different(case, curves, growth)
    if found.kind is DiffClass.ROUNDING or alignment.offset:
        return found
    return replace(found, explanation=(*found.explanation, *_by_parameter(a, b, parting.step)))


def _by_parameter(a: DiffSide, b: DiffSide, step: int) -> tuple[str, ...]:
    """Return what the records of both for parity show first, if that is in the step given."""
    try:
        first, second = (read_side(side.run.path, name) for side, name in ((a, "A"), (b, "B")))
    except NotRecordedError:
        return ()
    answer = compare(Bounds(first, second))
    return (answer.headline, *answer.notes) if answer.step == step else ()


def _coarsest(types: Iterable[str]) -> str:
    return max(types, key=UNIT_ROUNDOFF.__getitem__)
