"""Figures that show every worker at once: over time, and group by group of the parameters.

Colours tell how far a worker is from the others in the same steps, so that a trend which all share
does not hide it; the values themselves are where the pointer is.
"""

from collections.abc import Mapping, Sequence

from rankscope.web.bins import row_edges
from rankscope.web.parts import Spec, Tables, Width, channel, layer, layered, step_axis
from rankscope.web.series import Row

FAR = 6
"""Robust units at which the colours end."""
ROW = 14
"""Pixels of a worker's row, where there is room."""
GROUP_ROW = 17
ARROW = 12
"""Pixels between two arrows."""

UNITS = "robust units from the median"
"""What a map's colours tell: the distance from the workers' median, in robust deviations."""


def worker_map(
    tables: Tables,
    rows: Sequence[Row],
    num_workers: int,
    title: str,
    named: Sequence[int] = (),
    *,
    width: Width = "container",
) -> Spec:
    """Return the map of one signal: workers from top to bottom, steps from left to right.

    Args:
        tables: Keeps the data.
        rows: As :func:`rankscope.web.bins.map_rows` returns them.
        num_workers: W.
        title: Name of the value where the pointer is.
        named: Ranks that a finding names; an arrow at the right points at their rows.
        width: Pixels or ``"container"``.
    """
    ends = [min(r["first"] for r in rows) - 0.5, max(r["until"] for r in rows) - 0.5]
    x = step_axis(field="left", domain=ends, round=True)
    scale = _rank_scale(num_workers, reverse=True)
    y = channel("low:Q", axis=_rank_axis(), scale=scale)
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
    return layered(layers, width, height)


def _spaced(ranks: Sequence[int], least: float) -> list[int]:
    """Return ranks in order without those that are too close to the one before."""
    kept: list[int] = []
    for rank in sorted(ranks):
        if not kept or rank - kept[-1] >= least:
            kept.append(rank)
    return kept


def group_map(
    tables: Tables,
    rows: Sequence[Row],
    num_workers: int,
    title: str,
    legend: str,
    far: float,
    *,
    width: Width = "container",
) -> Spec:
    """Return one signal of every group of parameters and worker, over the last observed steps.

    Args:
        tables: Keeps the data.
        rows: Rows ``{group, deviation, value, rank}``, lists as in
            :func:`rankscope.web.bins.cells_of`, in the model's order.
        num_workers: W.
        title: Name of the value where the pointer is.
        legend: What the colours tell.
        far: Deviation at which the colours end.
        width: Pixels or ``"container"``.
    """
    order = [str(row["group"]) for row in rows]
    axis = {"title": None, "labelLimit": 150, "domain": False, "ticks": False, "grid": False}
    encoding = {
        "x": channel("low:Q", axis=_rank_axis(), scale=_rank_scale(num_workers)),
        "x2": {"field": "high"},
        "y": channel("group:N", sort=order, axis=axis, scale={"padding": 0}),
        "color": _colour(legend, far),
        "tooltip": _tips(title, channel("group:N", title="group")),
    }
    flat = _flat("group", num_workers)
    style = "cell" if num_workers <= 24 else "crowded-cell"
    cells = layer("rect", tables.add(rows), encoding, *flat, style=style)
    return layered([cells], width, GROUP_ROW * len(rows))


def _flat(key: str, num_workers: int) -> list[Spec]:
    """Return what makes one datum per cell of a map, from rank ``low`` to rank ``high``."""
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


def _rank_axis() -> Spec:
    marks = {"tickMinStep": 1, "tickCount": 8, "grid": False, "domain": False}
    return {"title": "rank", "format": ",d", **marks}


def _rank_scale(num_workers: int, *, reverse: bool = False) -> Spec:
    ends = {"domain": [-0.5, num_workers - 0.5], "nice": False, "zero": False}
    return {**ends, "round": True, "reverse": reverse}


def _colour(title: str, far: float) -> Spec:
    scale = {"domain": [-far, far], "domainMid": 0, "clamp": True, "interpolate": "rgb"}
    legend = {
        "title": title,
        "orient": "top",
        "direction": "horizontal",
        "titleOrient": "left",
        "titleLimit": 260,
        "gradientLength": 120,
        "gradientThickness": 8,
        "values": [-far, 0, far],
        "labelExpr": "(datum.value > 0 ? '+' : '') + datum.label",
        "offset": 6,
    }
    return channel("deviation:Q", scale=scale, legend=legend)


def _tips(title: str, place: Spec) -> list[Spec]:
    return [
        channel("rank:Q", title="rank", format=",d"),
        place,
        channel("value:Q", title=title, format=".4~g"),
        channel("deviation:Q", title="apart", format="+.2~f"),
    ]
