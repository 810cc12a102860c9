"""Two runs compared: the whole way from two directories to the verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.core.rounding import UNIT_ROUNDOFF
from rankscope.core.step import MISSING_INT
from rankscope.errors import RunError
from rankscope.numerics.diff.alignment import align
from rankscope.numerics.diff.classes import Case, Judgement, judge
from rankscope.numerics.diff.growth import curves_of, growth_of, jump_of
from rankscope.numerics.diff.parting import first_parting, tensors_at
from rankscope.numerics.diff.reading import Side
from rankscope.numerics.diff.result import (
    Change,
    Comparison,
    Curve,
    DiffClass,
    Growth,
    Jump,
)
from rankscope.numerics.diff.settings import changes_between, precision_change
from rankscope.numerics.diff.signals import Pair
from rankscope.numerics.diff.words import tell
from rankscope.record import Run

MAX_TENSORS = 100
"""Tensors that are told, those farthest apart first."""


def compare_runs(run_a: Run, run_b: Run, *, offset: int | None = None) -> Comparison:
    """Compare two recorded runs.

    Args:
        run_a: An open run.
        run_b: Another one of the same training, on as many or on other workers.
        offset: Step of A minus step of B; None: as batches and step numbers say.

    Returns:
        Where they first part, by how much, how that grows, and its class.

    Raises:
        RunError: A file is damaged, a run is empty, they have no step in common, or they train
            other models.
    """
    a, b = Side(run_a), Side(run_b)
    _check_models(a, b)
    alignment = align(a, b, offset)
    at_a = int(np.searchsorted(a.steps_T, alignment.steps_a[0]))
    at_b = int(np.searchsorted(b.steps_T, alignment.steps_b[0]))
    types = [_types_of(a), _types_of(b)]
    changes = changes_between(a, b)
    precision = precision_change(a, b, at_a, at_b)
    if precision is not None:
        changes = (precision, *changes)
        types[1] = [*types[1], "bfloat16"]  # which type it is, is not known: the coarsest
    dtypes = _coarsest(types[0]), _coarsest(types[1])
    pair = Pair(a, b, alignment, other_types=_layouts_differ(a, b, at_a, at_b))
    signals = pair.signals()
    parting = first_parting(pair, signals, _coarsest(dtypes))
    curves = curves_of(pair)
    if parting is None:
        return _told(pair, changes, curves, Judgement(DiffClass.IDENTICAL))
    at = int(np.searchsorted(alignment.steps_a, parting.step))
    case = Case(pair, signals, parting, at, changes, dtypes)
    jump = jump_of(pair, curves)
    judgement = judge(case, jump)
    growths = (_growth(curves, name) for name in _GROWN)
    growth = next((growth for growth in growths if growth is not None), None)
    return _told(pair, changes, curves, judgement, case, growth, jump)


_GROWN = ("parameters", "gradient", "loss")


def _growth(curves: Sequence[Curve], name: str) -> Growth | None:
    return next((growth_of(curve) for curve in curves if curve.name == name), None)


def _told(
    pair: Pair,
    changes: tuple[Change, ...],
    curves: tuple[Curve, ...],
    judgement: Judgement,
    case: Case | None = None,
    growth: Growth | None = None,
    jump: Jump | None = None,
) -> Comparison:
    told = tell(pair, changes, judgement, case, growth)
    parting = None if case is None else case.parting
    apart = None if case is None else tensors_at(pair, case.at, case.parting.moment)
    relative = {} if apart is None else apart.relative()
    if parting is not None and judgement.tensor and not parting.tensor:
        parting = replace(parting, tensor=judgement.tensor)
    return Comparison(
        run_a=pair.a.name,
        run_b=pair.b.name,
        kind=judgement.kind,
        headline=told.headline,
        explanation=tuple(told.explanation),
        advice=told.advice,
        causes=tuple(told.causes),
        alignment=pair.alignment,
        parting=parting,
        growth=growth,
        jump=jump if judgement.kind is DiffClass.JUMP else None,
        changes=changes,
        curves=curves,
        tensors=dict(list(relative.items())[:MAX_TENSORS]),
    )


def _check_models(a: Side, b: Side) -> None:
    """Refuse to compare two models.

    Raises:
        RunError: Their parameters have other numbers, or no name in common.
    """
    one, other = (_nested(side.info, "training", "parameters") for side in (a, b))
    for name in ("tensors", "elements"):
        if name in one and name in other and one[name] != other[name]:
            raise RunError(
                f"{a.name} and {b.name} train other models ({one[name]:,} and {other[name]:,} "
                f"{name} of parameters): give two runs of the same model"
            )
    names = [{name for each in side.traces.values() for name in each.names} for side in (a, b)]
    groups = [set(_nested(side.info, "options").get("groups") or ()) for side in (a, b)]
    for what, (left, right) in (("parameter", names), ("group of parameters", groups)):
        if left and right and not left & right:
            raise RunError(
                f"{a.name} and {b.name} train other models: they have no {what} in common; give "
                "two runs of the same model"
            )


def _nested(info: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found: Any = info
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _layouts_differ(a: Side, b: Side, at_a: int, at_b: int) -> bool:
    one, other = a.column("state_layout")[at_a, 0], b.column("state_layout")[at_b, 0]
    return bool(one != other and MISSING_INT not in (one, other))


def _types_of(side: Side) -> list[str]:
    """Return the types that a run computes, keeps and adds up its gradients in, as it says."""
    types = [str(name) for name in _nested(side.info, "training", "parameters", "types")]
    types += [str(name) for name in _nested(side.info, "options", "reduced_in").values()]
    hook = str(_nested(side.info, "training", "reduction").get("hook"))
    types += [dtype for word, dtype in _HOOKS.items() if word in hook]
    return [name for name in types if name in UNIT_ROUNDOFF] or ["float32"]


_HOOKS = {"bf16": "bfloat16", "fp16": "float16"}


def _coarsest(types: Iterable[str]) -> str:
    return max(types, key=UNIT_ROUNDOFF.__getitem__)
