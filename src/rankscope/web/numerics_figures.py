"""The figures of ``rankscope numerics`` about sums: how they err, and what their order changes.

They read the JSON form of measured sums (``rankscope.numerics.spread``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from rankscope.web.parts import Tables, Width, finish, tip

Values = Mapping[str, Any]

TYPES = ("float32", "bfloat16", "float16")
RING, TREE, WIDE = "ring", "tree", "ring, added in float32"
KINDS = (RING, TREE, WIDE)
"""What each panel of errors shows, in the order of the figures' colours."""

ALGORITHMS = {
    "sequential": "one after the other",
    "arrival": "arrival order",
    "ring": "ring",
    "halving": "halving",
    "tree": "tree",
}
"""Algorithms in words, from the least to the most even sums."""

MIN_ROW = 19
"""Pixels of a layer's row, at least."""

MAX_LAYERS = 24
"""Layers that are drawn; of more, an even choice."""


def usual_workers(sums: Values) -> int:
    """Return the world size that single numbers are given for: 8 if measured, else the largest."""
    numbers = [int(world["workers"]) for world in sums["worlds"]]
    return 8 if 8 in numbers else max(numbers)


def types_of(sums: Values) -> list[str]:
    """Return the types of buffers that were measured, widest first."""
    measured = {cell["inputs"] for cell in sums["cells"]}
    return [name for name in TYPES if name in measured]


def log_domain(values: Sequence[float | None], room: float = 1.6) -> list[float]:
    """Return a domain of a logarithmic axis that holds all positive values."""
    known = [value for value in values if value and value > 0]
    return [min(known, default=1e-9) / room, max(known, default=1.0) * room]


def log_axis(field: str, domain: Sequence[float], title: str | None = None) -> dict[str, Any]:
    """Return the arguments of a logarithmic axis with one label per power of ten, or of 100."""
    low, high = math.ceil(math.log10(domain[0])), math.floor(math.log10(domain[1]))
    every = max(1, math.ceil((high - low + 1) / 7))
    values = [float(f"1e{power}") for power in range(low, high + 1, every)]
    axis = alt.Axis(title=title, format=".0e", values=values)
    scale = alt.Scale(type="log", domain=list(domain), nice=False)
    return {"shorthand": f"{field}:Q", "axis": axis, "scale": scale}


def _workers_axis(numbers: Sequence[int]) -> alt.X:
    axis = alt.Axis(title="workers", values=sorted(set(numbers)), format=",d", grid=False)
    ends = [min(numbers) / 1.25, max(numbers) * 1.25]
    return alt.X("workers:Q", axis=axis, scale=alt.Scale(type="log", base=2, domain=ends))


def _kind_of(cell: Values) -> str | None:
    """Return which of the drawn kinds of sums a cell is of."""
    narrow = cell["inputs"] == cell["sums"]
    if cell["algorithm"] == "tree":
        return TREE if narrow else None
    if cell["algorithm"] != "ring":
        return None
    return RING if narrow else WIDE


def errors(
    tables: Tables, sums: Values, dtype: str, *, width: Width = "container", height: int = 230
) -> alt.LayerChart:
    """Return the error of sums in one type of buffer over world sizes, with its bounds.

    Points are measured; dashed lines are what rounding is expected to give, thin ones its bounds.

    Args:
        tables: Keeps the data.
        sums: Measured sums.
        dtype: Type of the buffer.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    rows = [
        {
            "workers": cell["workers"],
            "kind": kind,
            "error": positive(cell["error_relative"]),
            "predicted": positive(cell["predicted_relative"]),
            "bound": positive(cell["bound_relative"]),
        }
        for cell in sums["cells"]
        if cell["inputs"] == dtype and (kind := _kind_of(cell))
    ]
    domain = log_domain([row[name] for row in rows for name in ("error", "predicted", "bound")])
    x = _workers_axis([row["workers"] for row in rows])
    colour = alt.Color("kind:N", scale=alt.Scale(domain=list(KINDS)), legend=None)
    base = alt.Chart(tables.add(rows)).encode(x=x, color=colour)
    tips = [
        alt.Tooltip("kind:N", title="sum"),
        alt.Tooltip("workers:Q", title="workers"),
        tip("error", "measured"),
        tip("predicted", "expected"),
        tip("bound", "at most"),
    ]
    layers = [
        base.mark_line(strokeWidth=1, strokeOpacity=0.55).encode(
            y=alt.Y(**log_axis("bound", domain))
        ),
        base.mark_line(strokeWidth=1.4, strokeDash=[5, 4]).encode(
            y=alt.Y(**log_axis("predicted", domain))
        ),
        base.mark_point(filled=True, opacity=1, size=46).encode(
            y=alt.Y(**log_axis("error", domain)), tooltip=tips
        ),
    ]
    return finish(layers, width, height)


def algorithms(
    tables: Tables, sums: Values, *, width: Width = "container", height: int = 210
) -> alt.LayerChart:
    """Return the errors of all algorithms at one world size; ticks are bounds.

    Filled points: partial sums in the buffer's own type. Open ones: added in float32.
    """
    workers = usual_workers(sums)
    rows = [
        {
            "algorithm": ALGORITHMS.get(cell["algorithm"], cell["algorithm"]),
            "type": cell["inputs"],
            "sums": "own type" if cell["inputs"] == cell["sums"] else "added in float32",
            "error": positive(cell["error_relative"]),
            "bound": positive(cell["bound_relative"]),
        }
        for cell in sums["cells"]
        if cell["workers"] == workers
    ]
    domain = log_domain([row[name] for row in rows for name in ("error", "bound")])
    order = [name for name in ALGORITHMS.values() if any(r["algorithm"] == name for r in rows)]
    grid = alt.Axis(title=None, grid=True, domain=False, ticks=False, labelLimit=190)
    y = alt.Y("algorithm:N", sort=order, axis=grid)
    legend = alt.Legend(title=None, orient="top", symbolType="circle")
    colour = alt.Color("type:N", scale=alt.Scale(domain=types_of(sums)), legend=legend)
    base = alt.Chart(tables.add(rows)).encode(y=y, color=colour)
    tips: list[Any] = [
        alt.Tooltip("algorithm:N"),
        alt.Tooltip("type:N", title="buffer"),
        alt.Tooltip("sums:N", title="partial sums"),
        tip("error", "measured"),
        tip("bound", "at most"),
    ]
    title = f"relative error at {workers} workers"
    own = alt.FieldEqualPredicate(field="sums", equal="own type")
    points = base.encode(x=alt.X(**log_axis("error", domain, title)), tooltip=tips)
    layers = [
        base.transform_filter(own)
        .mark_tick(thickness=1.6, size=16, opacity=0.75)
        .encode(x=alt.X(**log_axis("bound", domain, title))),
        points.transform_filter(own).mark_point(filled=True, opacity=1, size=58),
        points.transform_filter(~own).mark_point(filled=False, opacity=1, size=64, strokeWidth=1.6),
    ]
    return finish(layers, width, height)


def evenly(names: Iterable[str]) -> list[str]:
    """Return the names of layers that are drawn: all, or an even choice of many."""
    known = list(names)
    if len(known) <= MAX_LAYERS:
        return known
    step = (len(known) - 1) / (MAX_LAYERS - 1)
    return [known[round(index * step)] for index in range(MAX_LAYERS)]


def layer_errors(
    tables: Tables, sums: Values, *, width: Width = "container", height: int = 210
) -> alt.LayerChart:
    """Return the error of each layer around a ring; ticks are what rounding is expected to give."""
    names = evenly(dict.fromkeys(layer["layer"] for layer in sums["layers"]))
    rows = [
        {
            "layer": layer["layer"],
            "type": layer["inputs"],
            "error": positive(layer["error_relative"]),
            "predicted": positive(layer["predicted_relative"]),
            "elements": layer["num_elements"],
        }
        for layer in sums["layers"]
        if layer["algorithm"] == "ring"
        and layer["inputs"] == layer["sums"]
        and layer["layer"] in names
    ]
    domain = log_domain([item[name] for item in rows for name in ("error", "predicted")])
    grid = alt.Axis(title=None, grid=True, domain=False, ticks=False, labelLimit=240)
    y = alt.Y("layer:N", sort=names, axis=grid)
    legend = alt.Legend(title=None, orient="top", symbolType="circle")
    colour = alt.Color("type:N", scale=alt.Scale(domain=types_of(sums)), legend=legend)
    base = alt.Chart(tables.add(rows)).encode(y=y, color=colour)
    workers = max((int(layer["workers"]) for layer in sums["layers"]), default=0)
    title = f"relative error at {workers} workers"
    tips = [
        alt.Tooltip("layer:N"),
        alt.Tooltip("type:N", title="buffer"),
        alt.Tooltip("elements:Q", format=",d"),
        tip("error", "measured"),
        tip("predicted", "expected"),
    ]
    marks = [
        base.mark_tick(thickness=1.6, size=13).encode(
            x=alt.X(**log_axis("predicted", domain, title))
        ),
        base.mark_point(filled=True, opacity=1, size=46).encode(
            x=alt.X(**log_axis("error", domain, title)), tooltip=tips
        ),
    ]
    return finish(marks, width, max(height, MIN_ROW * len(names)))


SPREADS = {
    "spread-median": ("spread_ulp", "median"),
    "spread-p99": ("spread_ulp", "p99"),
    "spread-share": ("share_differing", None),
}
"""What is drawn of the spread over orders: figure, and where its value stands in a cell."""


def spread(
    tables: Tables, sums: Values, name: str, *, width: Width = "container", height: int = 190
) -> alt.LayerChart:
    """Return how far results of different orders lie apart, over world sizes, in a ring.

    Lines are drawn one above the other, the widest type below: equal values stay visible.

    Args:
        tables: Keeps the data.
        sums: Measured sums.
        name: A key of :data:`SPREADS`.
        width: Pixels or ``"container"``.
        height: Pixels.
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
    scale = alt.Scale(domain=[0, 1.04 if part is None else max(1.0, high) * 1.08], nice=False)
    axis = alt.Axis(title=None, format="%" if part is None else ",~r")
    colour = alt.Color("type:N", scale=alt.Scale(domain=types_of(sums)), legend=None)
    base = alt.Chart(tables.add(rows)).encode(
        x=_workers_axis([row["workers"] for row in rows] or [2]),
        y=alt.Y("value:Q", axis=axis, scale=scale),
        color=colour,
    )
    tips = [
        alt.Tooltip("type:N", title="buffer"),
        alt.Tooltip("workers:Q", title="workers"),
        tip("value", "share" if part is None else "ULP"),
    ]
    types = types_of(sums)
    widths = alt.Scale(domain=types, range=[4.2, 2.6, 1.2][: len(types)])
    sizes = alt.Scale(domain=types, range=[110, 58, 22][: len(types)])
    lines = [
        base.mark_line(strokeJoin="round").encode(
            strokeWidth=alt.StrokeWidth("type:N", scale=widths, legend=None)
        ),
        base.mark_point(filled=True, opacity=1).encode(
            size=alt.Size("type:N", scale=sizes, legend=None), tooltip=tips
        ),
    ]
    return finish(lines, width, height)


def positive(value: float | None) -> float | None:
    """Return a value that a logarithmic axis can show; None for the others."""
    return value if value is not None and value > 0 else None
