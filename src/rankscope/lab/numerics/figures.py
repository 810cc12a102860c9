"""The figures of ``rankscope numerics``: errors of sums, effects of order, growth of rounding.

Those of sums read the JSON form of measured sums (``rankscope.lab.numerics.spread``), those of
trainings that of pairs of trainings (``rankscope.lab.study.rounding_result``).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rankscope.lab.numerics.spread import usual_workers
from rankscope.lab.numerics.summation import TYPES
from rankscope.report.parts import (
    DOT,
    Spec,
    Tables,
    channel,
    colours,
    column,
    dashes,
    layer,
    layered,
    log_axis,
    log_domain,
    step_tip,
    tip,
)
from rankscope.report.series import Row

Values = Mapping[str, Any]

RING = "ring"
TREE = "tree"
WIDE = "ring, added in float32"
KINDS = (RING, TREE, WIDE)  # the panels of errors, in the order of the figures' colours

ALGORITHMS = {
    "sequential": "one after the other",
    "arrival": "arrival order",
    "ring": "ring",
    "halving": "halving",
    "tree": "tree",
}
"""Algorithms in words, from the least to the most even sums."""

MIN_ROW = 19  # pixels of a layer's row, at least
MAX_LAYERS = 24  # layers that are drawn; of more, an even choice
SPREADS = {
    "spread-median": ("spread_ulp", "median"),
    "spread-p99": ("spread_ulp", "p99"),
    "spread-share": ("share_differing", None),
}
"""Figures of the spread over orders, and the place of their value in a cell."""

FAMILIES = ("order of the sum", "bfloat16", "float16", "data")
PAIRS = {
    "order": (FAMILIES[0], "arrival order", False),
    "workers": (FAMILIES[0], "twice the workers", True),
    "bfloat16": (FAMILIES[1], "bfloat16 buffers", False),
    "float16": (FAMILIES[2], "float16 buffers", False),
    "float16-scaled": (FAMILIES[2], "float16, scaled loss", True),
    "data": (FAMILIES[3], "other data order", False),
}
"""Colour, label, and whether the line is dashed, of each pair of trainings that is drawn."""


def types_of(sums: Values) -> list[str]:
    """Return the types of buffers that were measured, widest first."""
    measured = {cell["inputs"] for cell in sums["cells"]}
    return [name for name in TYPES if name in measured]


def _workers_axis(numbers: Sequence[int]) -> Spec:
    axis = {"title": "workers", "values": sorted(set(numbers)), "format": ",d", "grid": False}
    ends = [min(numbers) / 1.25, max(numbers) * 1.25]
    return channel("workers:Q", axis=axis, scale={"type": "log", "base": 2, "domain": ends})


def _name_axis(field: str, names: Sequence[str], limit: int = 240) -> Spec:
    """Return a vertical axis with a line for each name."""
    axis = {"title": None, "grid": True, "domain": False, "ticks": False, "labelLimit": limit}
    return channel(f"{field}:N", sort=list(names), axis=axis)


def _kind_of(cell: Values) -> str | None:
    """Return which of the drawn kinds of sums a cell is of."""
    narrow = cell["inputs"] == cell["sums"]
    if cell["algorithm"] == "tree":
        return TREE if narrow else None
    if cell["algorithm"] != "ring":
        return None
    return RING if narrow else WIDE


def errors(tables: Tables, sums: Values, dtype: str) -> Spec:
    """Return the error of sums in one type of buffer over world sizes, with its bounds.

    Points are measured; dashed lines are the prediction of rounding, thin ones its bounds.
    """
    rows = [
        {
            "workers": cell["workers"],
            "kind": kind,
            "error": _positive(cell["error_relative"]),
            "predicted": _positive(cell["predicted_relative"]),
            "bound": _positive(cell["bound_relative"]),
        }
        for cell in sums["cells"]
        if cell["inputs"] == dtype and (kind := _kind_of(cell))
    ]
    domain = log_domain([row[name] for row in rows for name in ("error", "predicted", "bound")])
    source = tables.add(rows)
    place = {
        "x": _workers_axis([row["workers"] for row in rows]),
        "color": colours("kind", KINDS),
    }
    tips = [
        channel("kind:N", title="sum"),
        channel("workers:Q", title="workers"),
        tip("error", "measured"),
        tip("predicted", "expected"),
        tip("bound", "at most"),
    ]
    y = {name: log_axis(name, domain) for name in ("bound", "predicted", "error")}
    bound = {**place, "y": y["bound"]}
    predicted = {**place, "y": y["predicted"]}
    points = {**place, "y": y["error"], "tooltip": tips}
    layers = [
        layer("line", source, bound, strokeWidth=1, strokeOpacity=0.55),
        layer("line", source, predicted, strokeWidth=1.4, strokeDash=[5, 4]),
        layer("point", source, points, size=46, **DOT),
    ]
    return layered(layers, 230)


def algorithms(tables: Tables, sums: Values) -> Spec:
    """Return the errors of all algorithms at one world size; ticks are bounds."""
    workers = usual_workers(sums)
    rows = [
        {
            "algorithm": ALGORITHMS.get(cell["algorithm"], cell["algorithm"]),
            "type": cell["inputs"],
            "sums": "own type" if cell["inputs"] == cell["sums"] else "added in float32",
            "error": _positive(cell["error_relative"]),
            "bound": _positive(cell["bound_relative"]),
        }
        for cell in sums["cells"]
        if cell["workers"] == workers
    ]
    domain = log_domain([row[name] for row in rows for name in ("error", "bound")])
    order = [name for name in ALGORITHMS.values() if any(r["algorithm"] == name for r in rows)]
    tips = [
        channel("algorithm:N"),
        channel("type:N", title="buffer"),
        channel("sums:N", title="partial sums"),
        tip("error", "measured"),
        tip("bound", "at most"),
    ]
    title = f"relative error at {workers} workers"
    source = tables.add(rows)
    place = {
        "y": _name_axis("algorithm", order, 190),
        "color": colours("type", types_of(sums), "circle"),
    }
    ticks = {**place, "x": log_axis("bound", domain, title)}
    points = {**place, "x": log_axis("error", domain, title), "tooltip": tips}
    own, other = _split_by("sums", "own type")
    layers = [
        layer("tick", source, ticks, own, thickness=1.6, size=16, opacity=0.75),
        layer("point", source, points, own, size=58, **DOT),
        layer("point", source, points, other, filled=False, opacity=1, size=64, strokeWidth=1.6),
    ]
    return layered(layers, 210)


def _split_by(field: str, value: Any) -> tuple[Spec, Spec]:
    """Return filters for the rows with a value and for those without it."""
    own = {"field": field, "equal": value}
    return {"filter": own}, {"filter": {"not": own}}


def _evenly(names: Iterable[str]) -> list[str]:
    """Return the names of layers that are drawn: all, or an even choice of many."""
    known = list(dict.fromkeys(names))
    if len(known) <= MAX_LAYERS:
        return known
    step = (len(known) - 1) / (MAX_LAYERS - 1)
    return [known[round(index * step)] for index in range(MAX_LAYERS)]


def layer_errors(tables: Tables, sums: Values, *, height: int = 210) -> Spec:
    """Return the error of each layer around a ring; ticks are the prediction of rounding."""
    names = _evenly(cell["layer"] for cell in sums["layers"])
    rows = [
        {
            "layer": cell["layer"],
            "type": cell["inputs"],
            "error": _positive(cell["error_relative"]),
            "predicted": _positive(cell["predicted_relative"]),
            "elements": cell["num_elements"],
        }
        for cell in sums["layers"]
        if cell["algorithm"] == "ring" and cell["inputs"] == cell["sums"] and cell["layer"] in names
    ]
    domain = log_domain([item[name] for item in rows for name in ("error", "predicted")])
    workers = max((int(cell["workers"]) for cell in sums["layers"]), default=0)
    title = f"relative error at {workers} workers"
    tips = [
        channel("layer:N"),
        channel("type:N", title="buffer"),
        channel("elements:Q", format=",d"),
        tip("error", "measured"),
        tip("predicted", "expected"),
    ]
    source = tables.add(rows)
    place = {
        "y": _name_axis("layer", names),
        "color": colours("type", types_of(sums), "circle"),
    }
    ticks = {**place, "x": log_axis("predicted", domain, title)}
    points = {**place, "x": log_axis("error", domain, title), "tooltip": tips}
    layers = [
        layer("tick", source, ticks, thickness=1.6, size=13),
        layer("point", source, points, size=46, **DOT),
    ]
    return layered(layers, max(height, MIN_ROW * len(names)))


def spread(tables: Tables, sums: Values, name: str) -> Spec:
    """Return how far results of different orders lie apart, over world sizes, in a ring.

    ``name`` is a key of :data:`SPREADS`. Lines are drawn one above the other, the widest type
    below: equal values stay visible.
    """
    field, part = SPREADS[name]
    rows = [
        {"workers": cell["workers"], "type": cell["inputs"], "value": value}
        for cell in sums["cells"]
        if cell["algorithm"] == "ring"
        and cell["inputs"] == cell["sums"]
        and (value := cell[field][part] if part else cell[field]) is not None
    ]
    high = max([row["value"] for row in rows], default=1.0)
    ends = [0, 1.04 if part is None else max(1.0, high) * 1.08]
    axis = {"title": None, "format": "%" if part is None else ",~r"}
    tips = [
        channel("type:N", title="buffer"),
        channel("workers:Q", title="workers"),
        tip("value", "share" if part is None else "ULP"),
    ]
    types = types_of(sums)
    source = tables.add(rows)
    place = {
        "x": _workers_axis([row["workers"] for row in rows] or [2]),
        "y": channel("value:Q", axis=axis, scale={"domain": ends, "nice": False}),
        "color": colours("type", types),
    }
    lines = {**place, "strokeWidth": _by_type(types, (4.2, 2.6, 1.2))}
    points = {**place, "size": _by_type(types, (110, 58, 22)), "tooltip": tips}
    layers = [
        layer("line", source, lines, strokeJoin="round"),
        layer("point", source, points, **DOT),
    ]
    return layered(layers, 190)


def _by_type(types: Sequence[str], sizes: Sequence[float]) -> Spec:
    scale = {"domain": list(types), "range": list(sizes[: len(types)])}
    return channel("type:N", scale=scale, legend=None)


def _positive(value: float | None) -> float | None:
    """Return a value that a logarithmic axis can show; None for the others."""
    return value if value is not None and value > 0 else None


def growth_rows(growth: Values, name: str) -> list[Row]:
    """Return one series of the pairs that are drawn as rows ``{step, value, pair, family}``."""
    evaluated: Sequence[int] = growth["evaluated"] if name == "evaluation" else ()
    return [
        {"step": step, "value": abs(value), "pair": PAIRS[pair["name"]][1],
         "family": PAIRS[pair["name"]][0], "dashed": PAIRS[pair["name"]][2]}
        for pair in growth["pairs"]
        if pair["name"] in PAIRS
        for step, value in zip(evaluated or range(1, len(pair[name]) + 1), pair[name], strict=True)
        if value
    ]  # fmt: skip


def curves(
    tables: Tables,
    growth: Values,
    name: str,
    *,
    height: int = 300,
    room: float = 1.34,
    others: Sequence[Values] = (),
    domain: Sequence[float] = (),
) -> Spec:
    """Return one series of every pair over steps, on a logarithmic axis, labelled at its end.

    ``name`` is a series of the pairs: ``distance``, ``evaluation``, … The axis of steps, the labels
    included, is ``room`` times as long as the steps. Pairs of ``others``, with other seeds, are
    drawn faintly behind; ``domain`` are the ends of the vertical axis, empty to fit the values.
    """
    rows = growth_rows(growth, name)
    behind = [
        {**row, "seed": seed}
        for seed, other in enumerate(others)
        for row in growth_rows(other, name)
    ]
    ends = domain or log_domain(column([*rows, *behind], "value"), room=1.9)
    last = max((row["step"] for row in rows), default=1)
    axis = {"title": "step", "format": ",d", "values": _ticks(last)}
    place = {
        "x": channel("step:Q", axis=axis, scale={"domain": [0, last * room], "nice": False}),
        "y": log_axis("value", ends),
        "color": colours("family", FAMILIES),
    }
    dashed = {**place, "strokeDash": dashes("dashed", {False: (1, 0), True: (5, 3)})}
    tips = [channel("pair:N"), step_tip(), tip("value", "difference")]
    source = tables.add(rows)
    layers: list[Spec] = []
    if behind:
        each = {**dashed, "detail": [channel("pair:N"), channel("seed:N")]}
        faint = {"strokeWidth": 1, "strokeOpacity": 0.4}
        layers.append(layer("line", tables.add(behind), each, **faint))
    lines = {**dashed, "detail": channel("pair:N")}
    layers.append(layer("line", source, lines, style="setting"))
    layers.append(layer("point", source, {**place, "tooltip": tips}, size=60, opacity=0))
    labels = tables.add(list(_end_labels(rows, ends, height)))
    names = {**place, "text": channel("pair:N")}
    layers.append(layer("text", labels, names, align="left", dx=7, fontSize=11))
    return layered(layers, height)


def layer_distances(tables: Tables, growth: Values) -> Spec:
    """Return how far apart each group of parameters is in the end; arrival order and the like."""
    rows = [
        {
            "layer": part["group"],
            "family": PAIRS[pair["name"]][0],
            "pair": PAIRS[pair["name"]][1],
            "own": not PAIRS[pair["name"]][2],
            "value": _positive(part["distance"]),
            "first": part["first_step"],
        }
        for pair in growth["pairs"]
        if pair["name"] in PAIRS
        for part in pair["layers"]
    ]
    names = _evenly(item["layer"] for item in rows)
    rows = [item for item in rows if item["layer"] in names]
    title = f"relative distance after {len(growth['loss'])} steps"
    points = {
        "x": log_axis("value", log_domain(column(rows, "value")), title),
        "y": _name_axis("layer", names),
        "color": colours("family", FAMILIES),
        "tooltip": [
            channel("layer:N"),
            channel("pair:N"),
            channel("first:Q", title="differs from step", format=",d"),
            tip("value", "distance"),
        ],
    }
    source = tables.add(rows)
    own, other = _split_by("own", True)
    layers = [
        layer("point", source, points, own, size=50, **DOT),
        layer("point", source, points, other, filled=False, opacity=1, size=50, strokeWidth=1.6),
    ]
    return layered(layers, max(240, MIN_ROW * len(names)))


def _ticks(last: int) -> list[int]:
    """Return a few whole steps up to the last one."""
    rough = last / 5
    unit = 10 ** math.floor(math.log10(max(rough, 1)))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [1, *range(step, last + 1, step)] if step > 1 else list(range(1, last + 1))


def _end_labels(rows: Sequence[Row], domain: Sequence[float], height: int) -> Iterator[Row]:
    """Yield a label for the end of each curve, moved apart so that none covers another."""
    ends = sorted({row["pair"]: row for row in rows}.values(), key=lambda row: -row["value"])
    decades = math.log10(domain[1] / domain[0])
    gap = 15 / height * decades
    levels = [math.log10(row["value"]) for row in ends]
    for _ in range(60):
        for upper in range(len(levels) - 1):
            overlap = gap - (levels[upper] - levels[upper + 1])
            if overlap > 1e-9:
                levels[upper] += overlap / 2
                levels[upper + 1] -= overlap / 2
    for row, level in zip(ends, levels, strict=True):
        yield {**row, "value": 10**level}
