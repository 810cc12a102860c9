"""The figures of one run, each defined once, for the page and for PNG files alike.

A figure holds data and roles; colours come from the configuration in ``document``. In maps of
workers, colours show the distance of one from the others in the same steps, so that a trend which
all share does not hide it; the values themselves are in the tooltip.

On the page, the script reads three conventions: it shares a parameter ``pinned`` (a rank) among all
figures that have one; a parameter ``frame`` is driven by a slider whose labels travel in
``usermeta``; a click on a row of the timeline sets the parameter ``finding`` to ``{anchor: [id]}``,
where id is that of the finding's article.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.report import series
from rankscope.report.parts import (
    DOT,
    Spec,
    Tables,
    channel,
    column,
    layer,
    layered,
    log_axis,
    log_domain,
    pointed,
    rank_axis,
    rate_domain,
    sized,
    step_axis,
    step_tip,
    tip,
    zoomable,
)
from rankscope.report.series import Row, row_edges

COST_HEIGHT = 150


def _with_crosshair(
    layers: Sequence[Spec], tooltip: Sequence[Spec], source: Spec, height: int
) -> Spec:
    """Return a figure whose crosshair follows the pointer and shows the values at that step."""
    x = step_axis()
    at = layer("rule", source, {"x": x, "tooltip": list(tooltip)}, strokeWidth=1, opacity=0)
    shown = {"filter": {"param": "at", "empty": False}}
    rule = layer("rule", source, {"x": x}, shown, style="crosshair")
    return layered([*layers, rule, at], height, [pointed("at", at, ["step"]), zoomable(at)])


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


def mean_and_range(tables: Tables, mean: Sequence[Row], ranges: Sequence[Row]) -> Spec:
    """Return the averaged loss over the workers' range, from rows ``{step, low, high}``."""
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
    return _with_crosshair([area, line], tips, source, 250)


def metric(
    tables: Tables, rows: Sequence[Row], title: str, *, expected: Sequence[Row] = ()
) -> Spec:
    """Return one metric, and what sampling alone gives, dashed, from rows ``{step, value}``."""
    domain = rate_domain(column(rows, "value"), column(expected, "value"), floor=0.01)
    y = channel("value:Q", axis={"title": None}, scale={"domain": domain})
    encoding = {"x": step_axis(), "y": y}
    layers: list[Spec] = []
    if any(value is not None for value in column(expected, "value")):
        layers.append(layer("line", tables.add(expected), encoding, style="expected"))
    source = tables.add(rows)
    layers.append(layer("line", source, encoding, style="measured"))
    tips = [step_tip(), tip("value", title or "value")]
    return _with_crosshair(layers, tips, source, 170)


def sample_coverage(tables: Tables, rows: Sequence[Row]) -> Spec:
    """Return drawn and distinct samples since the start, from rows ``{step, drawn, distinct}``."""
    source = tables.add(rows)
    axis = {"title": None, "format": ",d"}
    x = step_axis()
    y = channel("distinct:Q", axis=axis, scale={"zero": True})
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
        _end_label(tables, rows, "drawn", "drawn", "soft-label", dx=-30, dy=6),
        *([different] if repeats else []),
    ]
    return _with_crosshair(layers, tips, source, 250)


def residual(tables: Tables, rows: Sequence[Row]) -> Spec:
    """Return the reduction's residual over time, on a logarithmic scale, where it is above 0."""
    source = tables.add(rows)
    positive = {"filter": "datum.value > 0"}
    encoding = {"x": step_axis(), "y": log_axis("value", log_domain(column(rows, "value")))}
    dots = {**encoding, "tooltip": [step_tip(), tip("value", "residual")]}
    dot = {"style": "dot", "filled": True, "size": 26, "opacity": 0.9}
    layers = [
        layer("line", source, encoding, positive, style="measured"),
        layer("point", source, dots, positive, **dot),
    ]
    return layered(layers, COST_HEIGHT)


def time_per_step(tables: Tables, step: Sequence[Row], monitor: Sequence[Row]) -> Spec:
    """Return the slowest worker's and the monitor's time per step, from rows in milliseconds."""
    low, high = log_domain(column([*step, *monitor], "value"))
    room = (high / low) ** (3 * _AWAY / COST_HEIGHT)  # for a label over or under a curve
    curves = [[row for row in rows if (row["value"] or 0) > 0] for rows in (step, monitor)]
    ends = [_values_at_end(rows) for rows in curves]
    under = all(ends) and min(ends[0]) < room * max(ends[1])  # no label fits between the curves
    encoding = {
        "x": step_axis(),
        "y": log_axis("value", [low / room if under else low, high * room], form=",~g"),
    }
    layers: list[Spec] = []
    names: list[Spec] = []
    for known, end, style, words, label in (
        (curves[0], ends[0], "mean", "step", "ink-label"),
        (curves[1], ends[1], "measured", "monitor", "measured-label"),
    ):
        source = tables.add(known)
        tips = [step_tip(), tip("value", f"{words}, ms")]
        layers.append(layer("line", source, encoding, style=style, strokeWidth=1.6))
        layers.append(layer("point", source, {**encoding, "tooltip": tips}, opacity=0, size=60))
        if known:
            is_below = under and words == "monitor"
            value = min(end) if is_below else max(end)
            place = tables.add([{"step": known[-1]["step"], "value": value}])
            name = {"text": words, "align": "right", "dy": _AWAY if is_below else -_AWAY}
            names.append(layer("text", place, encoding, style=label, **name))
    return layered([*layers, *names], COST_HEIGHT)


_AWAY = 10  # pixels from a curve to the middle of its label


def _values_at_end(rows: Sequence[Row]) -> list[float]:
    """Return a curve's values in its last third, over which a label at its end may lie."""
    first = rows[-1]["step"] - (rows[-1]["step"] - rows[0]["step"]) / 3 if rows else 0
    return [row["value"] for row in rows if row["step"] >= first]


def interval(tables: Tables, rows: Sequence[Row]) -> Spec:
    """Return the number of steps between two measurements of the gradients, over time."""
    axis = {"title": None, "format": ",d", "tickMinStep": 1, "tickCount": 4}
    y = channel("value:Q", axis=axis, scale={"zero": True, "nice": True})
    source = tables.add(rows)
    encoding = {"x": step_axis(), "y": y}
    tips = [step_tip(), channel("value:Q", title="every … steps", format=",d")]
    layers = [
        layer("line", source, encoding, style="measured", interpolate="step-after"),
        layer("point", source, {**encoding, "tooltip": tips}, opacity=0, size=60),
    ]
    return layered(layers, COST_HEIGHT)


def worker_lines(
    tables: Tables, rows: Sequence[Row], title: str, named: Sequence[int] = ()
) -> Spec:
    """Return a signal of every worker, from rows ``{step, rank, value}``; ``named`` stand out."""
    source = tables.add(rows)
    y = channel("value:Q", axis={"title": None}, scale={"zero": False})
    encoding = {"x": step_axis(), "y": y, "detail": channel("rank:N")}
    tips = [channel("rank:O", title="rank"), step_tip(), tip("value", title)]
    drawn = len({row["rank"] for row in rows})
    opacity = min(0.7, max(0.14, 7 / max(drawn, 1)))
    layers = [layer("line", source, encoding, style="worker", strokeOpacity=opacity)]
    if named:
        layers.append(layer("line", source, encoding, _members(named), style="named"))
    pinned = {"filter": "datum.rank === pinned"}
    layers.append(layer("line", source, encoding, pinned, style="focus"))
    points = layer("point", source, {**encoding, "tooltip": tips}, opacity=0, size=30)
    near = pointed("near", points, ["rank"])
    params = [{"name": "pinned", "value": -1}, near, zoomable(points)]
    return layered([*layers, points], 190, params)


def worker_deviations(tables: Tables, rows: Sequence[Row], named: Sequence[int] = ()) -> Spec:
    """Return each worker's mean distance from all, from rows ``{rank, value, low, high}``."""
    source = tables.add(rows)
    ranks = [row["rank"] for row in rows]
    ends = [min(ranks, default=0) - 0.5, max(ranks, default=0) + 0.5]
    axis = rank_axis(max(ranks, default=0) + 1)
    x = channel("rank:Q", axis=axis, scale={"domain": ends, "nice": False})
    y = channel("value:Q", axis={"title": None, "tickCount": 3})
    tips = [channel("rank:O", title="rank"), tip("value", "mean difference")]
    encoding = {"x": x, "y": y, "tooltip": tips}
    bars = {"x": x, "y": channel("low:Q"), "y2": {"field": "high"}}
    layers = [
        layer("rule", tables.add([{"value": 0}]), {"y": y}, style="expected"),
        layer("rule", source, bars, style="whisker"),
        layer("point", source, encoding, style="dot", size=34, **DOT),
    ]
    if named:
        mine = _members(named)
        layers.append(layer("point", source, encoding, mine, style="named-dot", size=44, **DOT))
    return layered(layers, 110)


def _members(ranks: Sequence[int]) -> Spec:
    return {"filter": {"field": "rank", "oneOf": list(ranks)}}


FAR = 6  # robust units at which the colours end
ROW = 14  # pixels of a worker's row, where there is room
GROUP_ROW = 17
ARROW = 12  # pixels between two arrows

MATRIX = 400
LARGEST_CELL = 100  # pixels of a heatmap, and of a cell of few workers
MIN_CELL = 30  # pixels of a heatmap's cell that can hold its value in print
FINDING_ROW = 34  # pixels; the page's list of names beside the timeline has lines as high
MAX_FINDINGS = 40
SHAPES = {"note": "circle", "warning": "triangle-up", "error": "diamond"}

UNITS = "robust units from the median"  # legend of a map's colours: distance from the median


def worker_map(
    tables: Tables, rows: Sequence[Row], num_workers: int, title: str, named: Sequence[int] = ()
) -> Spec:
    """Return a map of workers and steps, from ``series.map_rows``; arrows point at ``named``."""
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
    calculated = [{"calculate": formula, "as": name} for name, formula in words.items()]
    flat = [*_flat("first", num_workers), _KNOWN, *calculated]
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
    """Return a map of groups and workers, from ``series.norm_rows``; colours end at ``far``."""
    order = [str(row["group"]) for row in rows]
    axis = {
        "title": None,
        "labelExpr": _END_OF_NAME,
        "labelLimit": 190,
        "domain": False,
        "ticks": False,
        "grid": False,
    }
    x = channel("low:Q", axis=_rank_axis(num_workers), scale=_rank_scale(num_workers))
    y = channel("group:N", sort=order, axis=axis, scale={"padding": 0, "domain": order})
    cell = {
        "x": x,
        "x2": {"field": "high"},
        "y": y,
        "tooltip": _tips(title, channel("group:N", title="group")),
    }
    flat = _flat("group", num_workers, "mark")
    source = tables.add(rows)
    crowded = num_workers > 24
    style = "crowded-cell" if crowded else "cell"
    colour = _colour(legend, far)
    colour["legend"]["titleOrient"] = "top"  # beside the colours it is too wide for a narrow page
    shown = {**cell, "color": colour}
    layers = [layer("rect", source, shown, *flat, _KNOWN, style=style)]
    marks = {mark for row in rows for mark in row["mark"]}
    centre = {"calculate": "(datum.low + datum.high) / 2", "as": "low"}
    if series.ABSENT in marks:
        absent = {"filter": {"field": "mark", "equal": series.ABSENT}}
        sign = {"title": None, "orient": "bottom", "symbolOpacity": 1}
        square = {"domain": ["no gradient"], "range": ["square"]}
        shape = {"datum": "no gradient", "type": "nominal", "scale": square, "legend": sign}
        look = {"filled": True, "size": 60, "style": "absent"}
        places = {"x": x, "y": y, "shape": shape}
        layers.append(layer("point", source, places, *flat, centre, absent, **look))
        layers.append(layer("rect", source, cell, *flat, absent, style=["absent", style]))
    for mark, style in ((series.ABSENT, "absent-label"), (series.UNKNOWN, "soft-label")):
        if mark in marks and not crowded:
            own = {"filter": {"field": "mark", "equal": mark}}
            places = {"x": x, "y": y}
            words = layer("text", source, places, *flat, centre, own, style=style, text=mark)
            layers.append(words)
    return layered(layers, GROUP_ROW * len(rows))


_BEGINNING = r"/^.*?\.(?=.{0,24}$)/"
_END_OF_NAME = f"length(datum.label) > 26 ? replace(datum.label, {_BEGINNING}, '…') : datum.label"
_KNOWN = {"filter": "isValid(datum.deviation)"}


def _flat(key: str, num_workers: int, *more: str) -> list[Spec]:
    """Return the transforms to one datum per cell of a map, from rank ``low`` to rank ``high``."""
    cells = len(row_edges(num_workers)) - 1
    at = "(datum.at - 1)"
    ends = {
        "low": f"floor({at} * {num_workers} / {cells}) - 0.5",
        "high": f"floor(({at} + 1) * {num_workers} / {cells}) - 0.5",
    }
    number = {"op": "row_number", "field": "", "as": "at"}
    return [
        {"flatten": ["deviation", "value", "rank", *more]},
        {"window": [number], "groupby": [key]},
        *({"calculate": formula, "as": name} for name, formula in ends.items()),
    ]


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
    size: int | None = None,
    legend: bool = True,
) -> Spec:
    """Return the W×W matrix of cosines; with labels, a frame parameter that a slider drives.

    Rows are ``{frame, cosines}`` with W² values each, row by row; one label per frame, none for a
    single frame; ``size`` is the side of the square in pixels, by default by the number of workers.
    """
    size = min(MATRIX, LARGEST_CELL * num_workers) if size is None else size
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
        strong = {"test": "abs(datum.cosine) > 0.55", "value": "#ffffff"}  # to be read on its own
        values = {
            **place,
            "text": channel("cosine:Q", format=".2f"),
            "color": {"condition": strong},
        }
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


def timeline(tables: Tables, findings: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> Spec:
    """Return the page's findings, in order, as spans of steps: severity in colour and shape."""
    rows: list[Row] = [
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
