"""The figures of one run, each defined once, for the page and for PNG files alike.

A figure holds data and roles; colours come from the configuration in ``theme``. On the page, the
script reads two conventions: a parameter ``frame`` is driven by a slider whose labels travel in
``usermeta``, and a parameter ``pinned`` (a rank) is shared by all figures that have one.
"""

from collections.abc import Sequence
from typing import Any

from rankscope.web.parts import (
    Spec,
    Tables,
    Width,
    channel,
    column,
    layer,
    layered,
    pointed,
    rate_domain,
    step_axis,
    step_tip,
    tip,
)
from rankscope.web.series import Row

MIN_CELL = 30
"""Pixels of a cell that can hold its value in print."""


def _with_crosshair(
    layers: Sequence[Spec], tooltip: Sequence[Spec], source: Spec, width: Width, height: int
) -> Spec:
    """Return a figure whose crosshair follows the pointer and tells the values at that step."""
    x = step_axis()
    at = layer("rule", source, {"x": x, "tooltip": list(tooltip)}, strokeWidth=1, opacity=0)
    shown = {"filter": {"param": "at", "empty": False}}
    rule = layer("rule", source, {"x": x}, shown, style="crosshair")
    return layered([*layers, rule, at], width, height, [pointed("at", at, ["step"])])


def _end_label(
    tables: Tables, rows: Sequence[Row], field: str, words: str, style: str, **mark: Any
) -> Spec:
    """Return a label at the last known point of a curve, in place of a legend."""
    known = [row for row in rows if row.get(field) is not None]
    last = {"step": known[-1]["step"], "value": known[-1][field]} if known else {}
    place = {"align": "right", "dx": 0, "dy": -9, **mark}
    source = tables.add([last] if last else [])
    encoding = {"x": channel("step:Q"), "y": channel("value:Q")}
    return layer("text", source, encoding, style=style, text=words, **place)


def averaged_loss(
    tables: Tables,
    mean: Sequence[Row],
    ranges: Sequence[Row],
    *,
    width: Width = "container",
    height: int = 250,
) -> Spec:
    """Return the averaged loss over the band from the lowest to the highest worker.

    Args:
        tables: Keeps the data.
        mean: Rows ``{step, value, low, high}`` of the averaged loss.
        ranges: Rows ``{step, low, high}`` of the band.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    look = {"axis": {"title": None}, "scale": {"zero": False, "nice": True}}
    ends = {"y": channel("low:Q", **look), "y2": {"field": "high"}}
    area = layer("area", tables.add(ranges), {"x": step_axis(), **ends}, style="band")
    source = tables.add(mean)
    encoding = {"x": step_axis(), "y": channel("value:Q", **look)}
    line = layer("line", source, encoding, style="mean")
    tips = [
        step_tip(),
        tip("high", "highest worker"),
        tip("value", "average"),
        tip("low", "lowest worker"),
    ]
    return _with_crosshair([area, line], tips, source, width, height)


def metric(
    tables: Tables,
    rows: Sequence[Row],
    title: str,
    *,
    expected: Sequence[Row] = (),
    width: Width = "container",
    height: int = 170,
) -> Spec:
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
    y = channel("value:Q", axis={"title": None}, scale={"domain": domain})
    encoding = {"x": step_axis(), "y": y}
    layers: list[Spec] = []
    if any(value is not None for value in column(expected, "value")):
        layers.append(layer("line", tables.add(expected), encoding, style="expected"))
    source = tables.add(rows)
    layers.append(layer("line", source, encoding, style="measured"))
    tips = [step_tip(), tip("value", title or "value")]
    return _with_crosshair(layers, tips, source, width, height)


def heatmap(
    tables: Tables,
    num_workers: int,
    labels: Sequence[str],
    rows: Sequence[Row],
    *,
    size: int = 400,
    legend: bool = True,
) -> Spec:
    """Return the W×W matrix of cosines; with labels, a frame parameter that a slider drives.

    Args:
        tables: Keeps the data.
        num_workers: W.
        labels: One label per frame; none if there is a single frame to show.
        rows: Rows ``{frame, cosines}`` with W² values each, row by row.
        size: Side of the square in pixels.
        legend: Whether to draw the colour scale.
    """
    source, place = tables.add(rows), _matrix(num_workers, size)
    cells = _cells(num_workers, framed=bool(labels))
    diagonal, pairs = ([*cells, {"filter": f"datum.i {sign} datum.j"}] for sign in ("===", "!=="))
    bar = {"title": "cosine", "gradientLength": min(size, 180), "values": [-1, 0, 1]}
    scale = {"domain": [-1, 1], "domainMid": 0, "interpolate": "rgb"}
    colour = channel("cosine:Q", scale=scale, legend=bar if legend else None)
    tips = [
        channel("i:O", title="rank"),
        channel("j:O", title="with rank"),
        channel("cosine:Q", title="cosine", format=".3f"),
    ]
    style = "cell" if num_workers <= 24 else "crowded-cell"
    layers = [
        layer("rect", source, place, *diagonal, style="diagonal"),
        layer("rect", source, {**place, "color": colour, "tooltip": tips}, *pairs, style=style),
    ]
    if size / num_workers >= MIN_CELL:
        known = {"filter": "isValid(datum.cosine)"}
        values = {**place, **_cell_values()}
        layers.append(layer("text", source, values, *pairs, known, fontSize=10.5))
    if not labels:
        return layered(layers, size, size)
    spec = layered(layers, size, size, [{"name": "frame", "value": 0}])
    return {**spec, "usermeta": {"frames": list(labels)}}


def _matrix(num_workers: int, size: int) -> dict[str, Spec]:
    """Return where a cell with the ranks ``i`` and ``j`` stands."""
    every = max(1, round(num_workers * 18 / size))
    axis = {
        "title": "rank",
        "values": list(range(0, num_workers, every)),
        "tickCount": num_workers,
        "labelAngle": 0,
        "domain": False,
        "ticks": False,
        "grid": False,
    }
    return {"x": channel("j:O", axis=axis), "y": channel("i:O", axis=axis)}


def _cells(num_workers: int, *, framed: bool) -> list[Spec]:
    """Return what makes one datum per cell with its ranks ``i`` and ``j``."""
    number = {"op": "row_number", "field": "", "as": "at"}
    return [
        *([{"filter": "datum.frame === frame"}] if framed else []),
        {"flatten": ["cosines"], "as": ["cosine"]},
        {"window": [number]},
        {"calculate": f"floor((datum.at - 1) / {num_workers})", "as": "i"},
        {"calculate": f"(datum.at - 1) % {num_workers}", "as": "j"},
    ]


def _cell_values() -> dict[str, Spec]:
    """Return the value of a cell in print, in a colour that its own lets one read."""
    strong = {"test": "abs(datum.cosine) > 0.55", "value": "#ffffff"}
    return {
        "text": channel("cosine:Q", format=".2f"),
        "color": {"condition": strong, "value": "#6b7684"},
    }


def sample_coverage(
    tables: Tables, rows: Sequence[Row], *, width: Width = "container", height: int = 250
) -> Spec:
    """Return drawn samples and the different ones among them, both counted from the start.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, drawn, distinct}``.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    source = tables.add(rows)
    axis = {"title": None, "format": ",d"}
    x, y = step_axis(), channel("distinct:Q", axis=axis, scale={"zero": True})
    tips = [
        step_tip(),
        channel("drawn:Q", title="drawn", format=",d"),
        channel("distinct:Q", title="different", format=",d"),
    ]
    last = rows[-1]
    repeats = last["distinct"] < 0.9 * last["drawn"]
    different = _end_label(tables, rows, "distinct", "different", "measured-label", dy=-12)
    layers = [
        layer("area", source, {"x": x, "y": y}, style="wash"),
        layer("line", source, {"x": x, "y": channel("drawn:Q")}, style="expected"),
        layer("line", source, {"x": x, "y": y}, style="measured"),
        _end_label(tables, rows, "drawn", "drawn", "soft-label", dx=-14, dy=-4),
        *([different] if repeats else []),
    ]
    return _with_crosshair(layers, tips, source, width, height)
