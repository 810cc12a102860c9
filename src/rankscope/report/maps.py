"""Figures in rows and cells: workers over time, by group and in pairs; findings over the steps.

In maps of workers, colours show the distance of one from the others in the same steps, so that a
trend which all share does not hide it; the values themselves are in the tooltip.

On the page, the script reads two conventions: a parameter ``frame`` is driven by a slider whose
labels travel in ``usermeta``, and a click on a row of the timeline sets the parameter ``finding``
to ``{anchor: [id]}``, where id is that of the finding's article.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.report.bins import row_edges
from rankscope.report.parts import (
    Spec,
    Tables,
    channel,
    layer,
    layered,
    pointed,
    rank_axis,
    sized,
    step_axis,
)
from rankscope.report.series import Row

FAR = 6
"""Robust units at which the colours end."""
ROW = 14
"""Pixels of a worker's row, where there is room."""
GROUP_ROW = 17
ARROW = 12
"""Pixels between two arrows."""

MIN_CELL = 30
"""Pixels of a heatmap's cell that can hold its value in print."""
FINDING_ROW = 34
"""Pixels of a row; the page's list of names beside the timeline has lines of that height."""
MAX_FINDINGS = 40
SHAPES = {"note": "circle", "warning": "triangle-up", "error": "diamond"}

UNITS = "robust units from the median"
"""Legend of a map's colours: the distance from the workers' median, in robust deviations."""


def worker_map(
    tables: Tables, rows: Sequence[Row], num_workers: int, title: str, named: Sequence[int] = ()
) -> Spec:
    """Return the map of one signal: workers from top to bottom, steps from left to right.

    Rows are those of :func:`rankscope.report.bins.map_rows`; ``title`` is the name of the value in
    the tooltip; arrows at the right point at the ``named`` ranks.
    """
    ends = [min(r["first"] for r in rows) - 0.5, max(r["until"] for r in rows) - 0.5]
    x = step_axis(field="left", domain=ends, round=True)
    scale = _rank_scale(num_workers, reverse=True)
    y = channel("low:Q", axis=_rank_axis(num_workers), scale=scale)
    later = "(datum.last > datum.first ? ' to ' + format(datum.last, ',') : '')"
    words = {
        "left": "datum.first - 0.5",
        "right": "datum.until - 0.5",
        "steps": f"format(datum.first, ',') + {later}",
    }
    encoding = {
        "x": x,
        "x2": {"field": "right"},
        "y": y,
        "y2": {"field": "high"},
        "color": _colour(UNITS, FAR),
        "tooltip": _tips(title, channel("steps:N", title="step")),
    }
    flat = [*_flat("first", num_workers), *_calculated(words)]
    layers = [layer("rect", tables.add(rows), encoding, *flat, style="crowded-cell")]
    height = min(256, max(64, ROW * (len(row_edges(num_workers)) - 1)))
    if named:
        shown = _spaced(named, ARROW * num_workers / height)
        source = tables.add([{"low": rank, "label": f"← {rank}"} for rank in shown])
        arrows = {"x": {"value": "width"}, "y": y, "text": channel("label:N")}
        layers.append(layer("text", source, arrows, style="named-label", align="left", dx=4))
    return layered(layers, height)


def _spaced(ranks: Sequence[int], least: float) -> list[int]:
    """Return ranks in order without those that are too close to the one before."""
    kept: list[int] = []
    for rank in sorted(ranks):
        if not kept or rank - kept[-1] >= least:
            kept.append(rank)
    return kept


def group_map(
    tables: Tables, rows: Sequence[Row], num_workers: int, title: str, legend: str, far: float
) -> Spec:
    """Return one signal of every group of parameters and worker, over the last observed steps.

    Rows are ``{group, deviation, value, rank}``, lists as in
    :func:`rankscope.report.bins.cells_of`, in the model's order. Colours have a ``legend``, and end
    at the deviation ``far``.
    """
    order = [str(row["group"]) for row in rows]
    axis = {"title": None, "labelLimit": 150, "domain": False, "ticks": False, "grid": False}
    encoding = {
        "x": channel("low:Q", axis=_rank_axis(num_workers), scale=_rank_scale(num_workers)),
        "x2": {"field": "high"},
        "y": channel("group:N", sort=order, axis=axis, scale={"padding": 0}),
        "color": _colour(legend, far),
        "tooltip": _tips(title, channel("group:N", title="group")),
    }
    flat = _flat("group", num_workers)
    style = "cell" if num_workers <= 24 else "crowded-cell"
    cells = layer("rect", tables.add(rows), encoding, *flat, style=style)
    return layered([cells], GROUP_ROW * len(rows))


def _flat(key: str, num_workers: int) -> list[Spec]:
    """Return the transforms to one datum per cell of a map, from rank ``low`` to rank ``high``."""
    cells = len(row_edges(num_workers)) - 1
    at = "(datum.at - 1)"
    ends = {
        "low": f"floor({at} * {num_workers} / {cells}) - 0.5",
        "high": f"floor(({at} + 1) * {num_workers} / {cells}) - 0.5",
    }
    number = {"op": "row_number", "field": "", "as": "at"}
    return [
        {"flatten": ["deviation", "value", "rank"]},
        {"window": [number], "groupby": [key]},
        *_calculated(ends),
        {"filter": "isValid(datum.deviation)"},
    ]


def _calculated(fields: Mapping[str, str]) -> list[Spec]:
    return [{"calculate": words, "as": name} for name, words in fields.items()]


def _rank_axis(num_workers: int) -> Spec:
    return {**rank_axis(num_workers), "grid": False, "domain": False}


def _rank_scale(num_workers: int, *, reverse: bool = False) -> Spec:
    ends = {"domain": [-0.5, num_workers - 0.5], "nice": False, "zero": False}
    return {**ends, "round": True, "reverse": reverse}


def _colour(title: str, far: float) -> Spec:
    scale = {"domain": [-far, far], "domainMid": 0, "clamp": True, "interpolate": "rgb"}
    return channel("deviation:Q", scale=scale, legend=_bar(title, far))


def _bar(title: str, far: float) -> Spec:
    """Return the legend of colours from ``-far`` to ``far``, above the figure."""
    return {
        "title": title,
        "orient": "top",
        "direction": "horizontal",
        "titleOrient": "left",
        "titleLimit": 260,
        "gradientLength": 80,
        "gradientThickness": 8,
        "values": [-far, 0, far],
        "labelExpr": "(datum.value > 0 ? '+' : '') + datum.label",
        "offset": 6,
    }


def _tips(title: str, place: Spec) -> list[Spec]:
    return [
        channel("rank:Q", title="rank", format=",d"),
        place,
        channel("value:Q", title=title, format=".4~g"),
        channel("deviation:Q", title="apart", format="+.2~f"),
    ]


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

    Rows are ``{frame, cosines}`` with W² values each, row by row; one label per frame, none for a
    single frame; ``size`` is the side of the square in pixels.
    """
    source = tables.add(rows)
    place = _matrix(num_workers, size)
    cells = _cells(num_workers, framed=bool(labels))
    diagonal, pairs = ([*cells, {"filter": f"datum.i {sign} datum.j"}] for sign in ("===", "!=="))
    bar = {**_bar("cosine", 1), "labelExpr": "datum.label"}
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
        layers.append(
            layer("text", source, values, *pairs, known, style="ink-label", fontSize=10.5)
        )
    if not labels:
        return sized(layered(layers, size), size)
    spec = sized(layered(layers, size, [{"name": "frame", "value": 0}]), size)
    return {**spec, "usermeta": {"frames": list(labels)}}


def _matrix(num_workers: int, size: int) -> dict[str, Spec]:
    """Return the place of the cell with the ranks ``i`` and ``j``."""
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
    """Return the transforms to one datum per cell with its ranks ``i`` and ``j``."""
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
        "color": {"condition": strong},
    }


def timeline_rows(findings: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows of the timeline from the page's findings, in their order."""
    return [
        {
            "at": index,
            "anchor": finding["anchor"],
            "severity": finding["severity"],
            "title": finding["title"],
            "ranks": finding["ranks"],
            "steps": finding["steps"],
            "first": finding["first_step"],
            "last": finding["last_step"],
            "explanation": finding["explanation"],
        }
        for index, finding in enumerate(findings[:MAX_FINDINGS])
    ]


def timeline(tables: Tables, rows: Sequence[Row], steps: Sequence[int]) -> Spec:
    """Return the findings as spans of steps, by severity in colour and shape."""
    domain = [
        min([steps[0], *(r["first"] for r in rows)]),
        max([steps[1], *(r["last"] for r in rows)]),
    ]
    x = step_axis(field="first", domain=domain)
    y = channel("at:O", axis=None, scale={"padding": 0})
    across = {"x": {"value": 0}, "x2": {"value": "width"}, "y": y}
    source = tables.add(rows)
    layers = [layer("rule", source, across, style="guide")]
    for severity, shape in SHAPES.items():
        if any(row["severity"] == severity for row in rows):
            own = {"filter": {"field": "severity", "equal": severity}}
            span = {"x": x, "x2": {"field": "last"}, "y": y}
            sign = {"shape": shape, "filled": severity != "note", "size": 90, "opacity": 1}
            layers.append(layer("rule", source, span, own, style=f"{severity}-span"))
            look = f"{severity}-sign"
            layers.append(layer("point", source, {"x": x, "y": y}, own, style=look, **sign))
    tips = [
        channel("title:N", title="finding"),
        channel("severity:N", title="severity"),
        channel("ranks:N", title="where"),
        channel("steps:N", title="when"),
        channel("explanation:N", title="what"),
    ]
    target = layer("rect", source, {**across, "tooltip": tips}, opacity=0, cursor="pointer")
    clicked = pointed("finding", target, ["anchor"], on="click")
    return layered([*layers, target], FINDING_ROW * len(rows), [clicked])
