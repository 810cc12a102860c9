"""The figures of ``rankscope numerics`` about trainings: how a difference in rounding grows.

They read the JSON form of pairs of trainings (``rankscope.study.rounding_result``).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from rankscope.web.numerics_figures import MIN_ROW, Values, evenly, log_axis, log_domain, positive
from rankscope.web.parts import Tables, Width, finish, tip
from rankscope.web.series import Row

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


def growth_rows(growth: Values, name: str) -> list[Row]:
    """Return one series of the pairs that are drawn as rows ``{step, value, pair, family}``.

    Args:
        growth: Pairs of trainings.
        name: A series of a pair; of differences, the size is taken. Zeros are left out.
    """
    return [
        {"step": step, "value": abs(value), "pair": PAIRS[pair["name"]][1],
         "family": PAIRS[pair["name"]][0], "dashed": PAIRS[pair["name"]][2]}
        for pair in growth["pairs"]
        if pair["name"] in PAIRS
        for step, value in zip(_steps(growth, name, pair), pair[name], strict=True)
        if value
    ]  # fmt: skip


def _steps(growth: Values, name: str, pair: Values) -> Sequence[int]:
    if name == "evaluation":
        steps: Sequence[int] = growth["evaluated"]
        return steps
    return range(1, len(pair[name]) + 1)


def curves(
    tables: Tables,
    growth: Values,
    name: str,
    *,
    width: Width = "container",
    height: int = 300,
    room: float = 1.34,
    others: Sequence[Values] = (),
    domain: Sequence[float] = (),
) -> alt.LayerChart:
    """Return one series of every pair over steps, on a logarithmic axis, labelled at its end.

    Args:
        tables: Keeps the data.
        growth: Pairs of trainings.
        name: A series of the pairs: ``distance``, ``evaluation``, …
        width: Pixels or ``"container"``.
        height: Pixels.
        room: Length of the axis of steps, the labels included, in terms of the steps.
        others: The same with other seeds, drawn faintly behind.
        domain: Ends of the vertical axis; empty to fit the values.
    """
    rows = growth_rows(growth, name)
    behind = [
        {**row, "seed": seed}
        for seed, other in enumerate(others)
        for row in growth_rows(other, name)
    ]
    ends = domain or log_domain([row["value"] for row in [*rows, *behind]], room=1.9)
    last = max((row["step"] for row in rows), default=1)
    axis = alt.Axis(title="step", format=",d", values=_ticks(last))
    x = alt.X("step:Q", axis=axis, scale=alt.Scale(domain=[0, last * room], nice=False))
    y = alt.Y(**log_axis("value", ends))
    colour = alt.Color("family:N", scale=alt.Scale(domain=list(FAMILIES)), legend=None)
    dash = alt.StrokeDash(
        "dashed:N", scale=alt.Scale(domain=[False, True], range=[[1, 0], [5, 3]]), legend=None
    )
    tips = [alt.Tooltip("pair:N"), alt.Tooltip("step:Q", format=",d"), tip("value", "difference")]
    source = tables.add(rows)
    base = alt.Chart(source).encode(x=x, y=y, color=colour)
    layers: list[alt.Chart] = []
    if behind:
        faint = alt.Chart(tables.add(behind)).encode(x=x, y=y, color=colour, strokeDash=dash)
        layers.append(
            faint.mark_line(strokeWidth=1, strokeOpacity=0.4).encode(detail=["pair:N", "seed:N"])
        )
    layers.append(base.mark_line(style="setting").encode(strokeDash=dash, detail="pair:N"))
    layers.append(base.mark_point(size=60, opacity=0).encode(tooltip=tips))
    labels = alt.Chart(tables.add(list(_end_labels(rows, ends, height))))
    layers.append(
        labels.mark_text(align="left", dx=7, fontSize=11).encode(
            x=x, y=y, color=colour, text="pair:N"
        )
    )
    return finish(layers, width, height)


def layers(
    tables: Tables, growth: Values, *, width: Width = "container", height: int = 240
) -> alt.LayerChart:
    """Return how far apart each group of parameters is in the end; arrival order and the like."""
    rows = [
        {
            "layer": layer["group"],
            "family": PAIRS[pair["name"]][0],
            "pair": PAIRS[pair["name"]][1],
            "own": not PAIRS[pair["name"]][2],
            "value": positive(layer["distance"]),
            "first": layer["first_step"],
        }
        for pair in growth["pairs"]
        if pair["name"] in PAIRS
        for layer in pair["layers"]
    ]
    names = evenly(dict.fromkeys(item["layer"] for item in rows))
    rows = [item for item in rows if item["layer"] in names]
    domain = log_domain([item["value"] for item in rows])
    grid = alt.Axis(title=None, grid=True, domain=False, ticks=False, labelLimit=240)
    title = f"relative distance after {len(growth['loss'])} steps"
    tips: list[Any] = [
        alt.Tooltip("layer:N"),
        alt.Tooltip("pair:N"),
        alt.Tooltip("first:Q", title="differs from step", format=",d"),
        tip("value", "distance"),
    ]
    base = alt.Chart(tables.add(rows)).encode(
        x=alt.X(**log_axis("value", domain, title)),
        y=alt.Y("layer:N", sort=names, axis=grid),
        color=alt.Color("family:N", scale=alt.Scale(domain=list(FAMILIES)), legend=None),
        tooltip=tips,
    )
    own = alt.FieldEqualPredicate(field="own", equal=True)
    points = [
        base.transform_filter(own).mark_point(filled=True, opacity=1, size=50),
        base.transform_filter(~own).mark_point(filled=False, opacity=1, size=50, strokeWidth=1.6),
    ]
    return finish(points, width, max(height, MIN_ROW * len(names)))


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
