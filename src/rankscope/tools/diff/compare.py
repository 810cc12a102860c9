"""Two runs compared: the whole way from two directories to the verdict."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope import Run
from rankscope.bus.environment import is_compared
from rankscope.bus.step import MISSING_INT
from rankscope.errors import RunError
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.tools.diff.classes import DifferenceCase, Judgement, judge
from rankscope.tools.diff.parting import (
    CURVES,
    curves_of,
    first_parting,
    growth_of,
    jump_of,
    tensors_at,
)
from rankscope.tools.diff.reading import DiffSide, align
from rankscope.tools.diff.result import (
    Change,
    Comparison,
    Curve,
    DiffClass,
    DifferenceGrowth,
    Jump,
)
from rankscope.tools.diff.signals import Pair
from rankscope.tools.diff.words import describe

MAX_TENSORS = 100
"""Tensors that a comparison lists, those farthest apart first."""

_PLACES = re.compile(
    r"(^|[._])(run_?dir|output\w*|path|dir|directory|name|id|time|date|log\w*|resume\w*)$"
)
_SEED = re.compile(r"(^|[._-])seeds?($|[._-])")
_TYPE = re.compile(r"(dtype|precision|autocast|bf16|fp16|\bamp\b|parameters\.types|\.layout$)")
_LIKE_TYPE = re.compile(r"bfloat16|float16|float32|float64|bf16|fp16|fp32")
_OF_A_JOB = frozenset(
    {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
MAX_VALUE = 80
KINDS = (*("dtype", "training", "reduction", "config", "seed", "loader", "environment", "monitor"),)
"""Kinds of settings, the decisive ones first."""


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
    _check_models(a, b)
    alignment = align(a, b, offset)
    at_a = int(np.searchsorted(a.steps_T, alignment.steps_a[0]))
    at_b = int(np.searchsorted(b.steps_T, alignment.steps_b[0]))
    types = [_types_of(a), _types_of(b)]
    changes = _changes_between(a, b)
    precision = _precision_change(a, b, at_a, at_b)
    if precision is not None:
        changes = (precision, *changes)
        types[1] = [*types[1], "bfloat16"]  # its type is unknown: take the coarsest
    dtypes = _coarsest(types[0]), _coarsest(types[1])
    pair = Pair(a, b, alignment, other_types=_layouts_differ(a, b, at_a, at_b))
    signals = pair.signals()
    parting = first_parting(pair, signals, _coarsest(dtypes))
    curves = curves_of(pair)
    if parting is None:
        return _comparison(pair, changes, curves, Judgement(DiffClass.IDENTICAL))
    at = int(np.searchsorted(alignment.steps_a, parting.step))
    case = DifferenceCase(pair, signals, parting, at, changes, dtypes)
    jump = jump_of(pair, curves)
    judgement = judge(case, jump)
    grown = [growth_of(curve) for name in CURVES for curve in curves if curve.name == name]
    growth = next((growth for growth in grown if growth is not None), None)
    return _comparison(pair, changes, curves, judgement, case, growth, jump)


def _comparison(
    pair: Pair,
    changes: tuple[Change, ...],
    curves: tuple[Curve, ...],
    judgement: Judgement,
    case: DifferenceCase | None = None,
    growth: DifferenceGrowth | None = None,
    jump: Jump | None = None,
) -> Comparison:
    text = describe(pair, changes, judgement, case, growth)
    parting = None if case is None else case.parting
    apart = None if case is None else tensors_at(pair, case.at, case.parting.moment)
    relative = {} if apart is None else apart.relative()
    if parting is not None and judgement.tensor and not parting.tensor:
        parting = replace(parting, tensor=judgement.tensor)
    return Comparison(
        run_a=pair.a.name,
        run_b=pair.b.name,
        kind=judgement.kind,
        headline=text.headline,
        explanation=tuple(text.explanation),
        advice=text.advice,
        causes=tuple(text.causes),
        alignment=pair.alignment,
        parting=parting,
        growth=growth,
        jump=jump if judgement.kind is DiffClass.JUMP else None,
        changes=changes,
        curves=curves,
        tensors=dict(list(relative.items())[:MAX_TENSORS]),
    )


def _check_models(a: DiffSide, b: DiffSide) -> None:
    """Raise RunError when two models have other numbers of parameters, or no name in common."""
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


def _layouts_differ(a: DiffSide, b: DiffSide, at_a: int, at_b: int) -> bool:
    one = a.column("state_layout")[at_a, 0]
    other = b.column("state_layout")[at_b, 0]
    return bool(one != other and MISSING_INT not in (one, other))


def _types_of(side: DiffSide) -> list[str]:
    """Return the recorded types in which a run computes, keeps and adds up its gradients."""
    types = [str(name) for name in _nested(side.info, "training", "parameters", "types")]
    types += [str(name) for name in _nested(side.info, "options", "reduced_in").values()]
    hook = str(_nested(side.info, "training", "reduction").get("hook"))
    types += [dtype for word, dtype in _HOOKS.items() if word in hook]
    return [name for name in types if name in UNIT_ROUNDOFF] or ["float32"]


_HOOKS = {"bf16": "bfloat16", "fp16": "float16"}


def _coarsest(types: Iterable[str]) -> str:
    return max(types, key=UNIT_ROUNDOFF.__getitem__)


def _changes_between(a: DiffSide, b: DiffSide) -> tuple[Change, ...]:
    """Return the settings and facts of ``run.json`` that differ, the decisive ones first.

    Names of directories, hosts and processes are no settings.
    """
    found = []
    for part in ("training", "config", "options"):
        one = _flat(a.info.get(part), part)
        other = _flat(b.info.get(part), part)
        if not one or not other:
            continue  # an older record does not have it
        for name in sorted(one.keys() | other.keys()):
            left = one.get(name)
            right = other.get(name)
            if left != right and not _PLACES.search(name):
                found.append(Change(name, _short(left), _short(right), _kind(name, left, right)))
    if any(change.name.startswith("training.parameters.types") for change in found):
        found = [change for change in found if change.name != "training.parameters.layout"]
    found += _environment(a, b)
    return tuple(sorted(found, key=lambda change: KINDS.index(change.kind)))


def _precision_change(a: DiffSide, b: DiffSide, at_a: int, at_b: int) -> Change | None:
    """Return the difference between the forward passes' precisions in a step; None if none."""
    one = a.column("precision")[at_a, 0]
    other = b.column("precision")[at_b, 0]
    missing = min(int(one), int(other)) == MISSING_INT
    if missing or one == other:
        return None
    left, right = (f"digest {int(value) % 2**32:08x}" for value in (one, other))
    return Change("precision of the forward pass", left, right, "dtype")


def _environment(a: DiffSide, b: DiffSide) -> list[Change]:
    one, other = (_facts_of(side) for side in (a, b))
    names = [n for n in sorted(one.keys() | other.keys()) if is_compared(n) and n not in _OF_A_JOB]
    return [
        Change(f"environment.{name}", _short(one.get(name)), _short(other.get(name)), "environment")
        for name in names
        if one.get(name) != other.get(name)
    ]


def _facts_of(side: DiffSide) -> dict[str, Any]:
    ranks = side.info.get("ranks")
    if not isinstance(ranks, list) or not ranks or not isinstance(ranks[0], Mapping):
        return {}
    facts = {name: ranks[0][name] for name in ("torch", "threads") if name in ranks[0]}
    environment = ranks[0].get("environment")
    return {**facts, **environment} if isinstance(environment, Mapping) else facts


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Return nested settings by dotted name."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flat(item, f"{name}.{key}")
        return found
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        found = {}
        for index, item in enumerate(value):
            found |= _flat(item, f"{name}.{index}")
        return found
    return {} if value is None and "." not in name else {name: value}


def _kind(name: str, left: Any, right: Any) -> str:
    if name.startswith("options.reduced_in"):
        return "dtype"
    if name.startswith("options."):
        return "monitor"
    if _SEED.search(name):
        return "seed"
    if name.startswith("training.loader"):
        return "loader"
    if _TYPE.search(name) or _LIKE_TYPE.search(f"{left} {right}"):
        return "dtype"
    if name.startswith("training.reduction"):
        return "reduction"
    return "training" if name.startswith("training.") else "config"


def _short(value: Any) -> Any:
    if isinstance(value, str | list):
        text = value if isinstance(value, str) else str(value)
        return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"
    return value
