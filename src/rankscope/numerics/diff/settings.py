"""Settings and facts in which two runs differ, by name."""

import re
from collections.abc import Mapping
from typing import Any

from rankscope.core.environment import is_compared
from rankscope.numerics.diff.reading import Side
from rankscope.numerics.diff.result import Change

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
"""What a setting is about, the decisive ones first."""


def changes_between(a: Side, b: Side) -> tuple[Change, ...]:
    """Return the settings and facts of ``run.json`` that differ, the decisive ones first.

    Names of directories, hosts and processes are no settings.
    """
    found = []
    for part in ("training", "config", "options"):
        one, other = _flat(a.info.get(part), part), _flat(b.info.get(part), part)
        if not one or not other:
            continue  # an older record does not say it
        for name in sorted(one.keys() | other.keys()):
            left, right = one.get(name), other.get(name)
            if left != right and not _PLACES.search(name):
                found.append(Change(name, _short(left), _short(right), _kind(name, left, right)))
    if any(change.name.startswith("training.parameters.types") for change in found):
        found = [change for change in found if change.name != "training.parameters.layout"]
    found += _environment(a, b)
    return tuple(sorted(found, key=lambda change: KINDS.index(change.kind)))


def precision_change(a: Side, b: Side, at_a: int, at_b: int) -> Change | None:
    """Return that the forward passes have another precision in a step, if so."""
    one, other = a.column("precision")[at_a, 0], b.column("precision")[at_b, 0]
    missing = min(int(one), int(other)) == -(2**63)
    if missing or one == other:
        return None
    left, right = (f"digest {int(value) % 2**32:08x}" for value in (one, other))
    return Change("precision of the forward pass", left, right, "dtype")


def _environment(a: Side, b: Side) -> list[Change]:
    one, other = (_facts_of(side) for side in (a, b))
    names = [n for n in sorted(one.keys() | other.keys()) if is_compared(n) and n not in _OF_A_JOB]
    return [
        Change(f"environment.{name}", _short(one.get(name)), _short(other.get(name)), "environment")
        for name in names
        if one.get(name) != other.get(name)
    ]


def _facts_of(side: Side) -> dict[str, Any]:
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
