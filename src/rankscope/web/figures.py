"""The figures of one run, each defined once, for the page and for PNG files alike.

A figure holds data and roles; colours come from the configuration in ``theme``. On the page, the
script reads two conventions: a parameter ``frame`` is driven by a slider whose labels travel in
``usermeta``, and a parameter ``pinned`` (a rank) is shared by all figures that have one.
"""

from collections.abc import Sequence
from typing import Any

import altair as alt

from rankscope.web.parts import Tables, Width, column, finish, rate_domain, step_axis, tip
from rankscope.web.series import Row

MIN_CELL = 30
"""Pixels of a cell that can hold its value in print."""


def _hover(tooltip: Sequence[alt.Tooltip], source: alt.NamedData) -> list[alt.Chart]:
    """Return a crosshair that follows the pointer and tells the values at the nearest step."""
    near = alt.selection_point(
        name="at", nearest=True, on="pointerover", clear="pointerout", fields=["step"], empty=False
    )
    targets = (
        alt.Chart(source)
        .mark_rule(strokeWidth=1, opacity=0)
        .encode(x=step_axis(), tooltip=list(tooltip))
        .add_params(near)
    )
    rule = alt.Chart(source).mark_rule(style="crosshair").encode(x=step_axis())
    return [rule.transform_filter(near), targets]


def _end_label(
    tables: Tables, rows: Sequence[Row], field: str, words: str, style: str, **mark: Any
) -> alt.Chart:
    """Return a label at the last known point of a curve, in place of a legend."""
    known = [row for row in rows if row.get(field) is not None]
    last = {"step": known[-1]["step"], "value": known[-1][field]} if known else {}
    place = {"align": "right", "dx": 0, "dy": -9, **mark}
    label: alt.Chart = (
        alt.Chart(tables.add([last] if last else []))
        .mark_text(style=style, text=words, **place)
        .encode(x="step:Q", y="value:Q")
    )
    return label


def averaged_loss(
    tables: Tables,
    mean: Sequence[Row],
    ranges: Sequence[Row],
    *,
    width: Width = "container",
    height: int = 250,
) -> alt.LayerChart:
    """Return the averaged loss over the band from the lowest to the highest worker.

    Args:
        tables: Keeps the data.
        mean: Rows ``{step, value, low, high}`` of the averaged loss.
        ranges: Rows ``{step, low, high}`` of the band.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    scale = alt.Scale(zero=False, nice=True)
    axis = alt.Axis(title=None)
    area = (
        alt.Chart(tables.add(ranges))
        .mark_area(style="band")
        .encode(x=step_axis(), y=alt.Y("low:Q", axis=axis, scale=scale), y2="high:Q")
    )
    line = (
        alt.Chart(tables.add(mean))
        .mark_line(style="mean")
        .encode(x=step_axis(), y=alt.Y("value:Q", axis=axis, scale=scale))
    )
    tips = [
        alt.Tooltip("step:Q", title="step", format=",d"),
        tip("high", "highest worker"),
        tip("value", "average"),
        tip("low", "lowest worker"),
    ]
    return finish([area, line, *_hover(tips, tables.add(mean))], width, height)


def metric(
    tables: Tables,
    rows: Sequence[Row],
    title: str,
    *,
    expected: Sequence[Row] = (),
    width: Width = "container",
    height: int = 170,
) -> alt.LayerChart:
    """Return one dispersion metric over time, with what sampling alone would give if known.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, value}``.
        title: Name of the value where the pointer is.
        expected: Rows ``{step, value}`` of the null, drawn dashed.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    domain = rate_domain(column(rows, "value"), column(expected, "value"), floor=0.01)
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(domain=domain))
    layers: list[alt.Chart] = []
    if any(value is not None for value in column(expected, "value")):
        dashed = alt.Chart(tables.add(expected)).mark_line(style="expected")
        layers.append(dashed.encode(x=step_axis(), y=y))
    layers.append(
        alt.Chart(tables.add(rows)).mark_line(style="measured").encode(x=step_axis(), y=y)
    )
    tips = [alt.Tooltip("step:Q", title="step", format=",d"), tip("value", title or "value")]
    return finish([*layers, *_hover(tips, tables.add(rows))], width, height)


def heatmap(
    tables: Tables,
    num_workers: int,
    labels: Sequence[str],
    rows: Sequence[Row],
    *,
    size: int = 400,
    legend: bool = True,
) -> alt.LayerChart:
    """Return the W×W matrix of cosines; with labels, a frame parameter that a slider drives.

    Args:
        tables: Keeps the data.
        num_workers: W.
        labels: One label per frame; none if there is a single frame to show.
        rows: Rows ``{frame, cosines}`` with W² values each, row by row.
        size: Side of the square in pixels.
        legend: Whether to draw the colour scale.
    """
    cells = _cells(tables.add(rows), num_workers, size, framed=bool(labels))
    pairs = cells.transform_filter("datum.i !== datum.j")
    diagonal = cells.transform_filter("datum.i === datum.j").mark_rect(style="diagonal")
    if labels:
        diagonal = diagonal.add_params(alt.param(name="frame", value=0))
    bar = alt.Legend(title="cosine", gradientLength=min(size, 180), values=[-1, 0, 1])
    scale = alt.Scale(domain=[-1, 1], domainMid=0, interpolate="rgb")
    colour = alt.Color("cosine:Q", scale=scale, legend=bar if legend else None)
    tips = [
        alt.Tooltip("i:O", title="rank"),
        alt.Tooltip("j:O", title="with rank"),
        alt.Tooltip("cosine:Q", title="cosine", format=".3f"),
    ]
    style = "cell" if num_workers <= 24 else "crowded-cell"
    layers = [diagonal, pairs.mark_rect(style=style).encode(color=colour, tooltip=tips)]
    if size / num_workers >= MIN_CELL:
        layers.append(_cell_values(pairs))
    chart = finish(layers, size, size)
    if labels:
        chart.usermeta = {"frames": list(labels)}
    return chart


def _cells(source: alt.NamedData, num_workers: int, size: int, *, framed: bool) -> alt.Chart:
    """Return the base of all layers: one datum per cell with its ranks ``i`` and ``j``."""
    every = max(1, round(num_workers * 18 / size))
    axis = alt.Axis(
        title="rank",
        values=list(range(0, num_workers, every)),
        tickCount=num_workers,
        labelAngle=0,
        domain=False,
        ticks=False,
        grid=False,
    )
    base = alt.Chart(source)
    if framed:
        base = base.transform_filter("datum.frame === frame")
    return (
        base.transform_flatten(["cosines"], as_=["cosine"])
        .transform_window(at="row_number()")
        .transform_calculate(
            i=f"floor((datum.at - 1) / {num_workers})", j=f"(datum.at - 1) % {num_workers}"
        )
        .encode(x=alt.X("j:O", axis=axis), y=alt.Y("i:O", axis=axis))
    )


def _cell_values(cells: alt.Chart) -> alt.Chart:
    strong = "abs(datum.cosine) > 0.55"
    values: alt.Chart = (
        cells.transform_filter("isValid(datum.cosine)")
        .mark_text(fontSize=10.5)
        .encode(
            text=alt.Text("cosine:Q", format=".2f"),
            color=alt.condition(strong, alt.value("#ffffff"), alt.value("#6b7684")),
        )
    )
    return values


def sample_coverage(
    tables: Tables, rows: Sequence[Row], *, width: Width = "container", height: int = 250
) -> alt.LayerChart:
    """Return drawn samples and the different ones among them, both counted from the start.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, drawn, distinct}``.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    source = tables.add(rows)
    axis = alt.Axis(title=None, format=",d")
    y = alt.Y("distinct:Q", axis=axis, scale=alt.Scale(zero=True))
    base = alt.Chart(source).encode(x=step_axis())
    tips = [
        alt.Tooltip("step:Q", title="step", format=",d"),
        alt.Tooltip("drawn:Q", title="drawn", format=",d"),
        alt.Tooltip("distinct:Q", title="different", format=",d"),
    ]
    last = rows[-1]
    repeats = last["distinct"] < 0.9 * last["drawn"]
    different = _end_label(tables, rows, "distinct", "different", "measured-label", dy=-12)
    layers = [
        base.mark_area(style="wash").encode(y=y),
        base.mark_line(style="expected").encode(y="drawn:Q"),
        base.mark_line(style="measured").encode(y=y),
        _end_label(tables, rows, "drawn", "drawn", "soft-label", dx=-14, dy=-4),
        *([different] if repeats else []),
        *_hover(tips, source),
    ]
    return finish(layers, width, height)
