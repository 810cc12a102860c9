"""Figures that show every worker at once: over time, and group by group of the parameters.

Colours tell how far a worker is from the others in the same steps, so that a trend which all share
does not hide it; the values themselves are where the pointer is.
"""

from collections.abc import Sequence

import altair as alt

from rankscope.web.bins import row_edges
from rankscope.web.parts import Tables, Width, finish, step_axis
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
) -> alt.LayerChart:
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
    x = step_axis(field="left").scale(domain=ends, nice=False, zero=False, round=True)
    y = alt.Y("low:Q", axis=_rank_axis(), scale=_rank_scale(num_workers, reverse=True))
    later = "(datum.last > datum.first ? ' to ' + format(datum.last, ',') : '')"
    cells = (
        _flat(tables, rows, "first", num_workers)
        .transform_calculate(
            left="datum.first - 0.5",
            right="datum.until - 0.5",
            steps=f"format(datum.first, ',') + {later}",
        )
        .mark_rect(style="crowded-cell")
        .encode(
            x=x,
            x2="right:Q",
            y=y,
            y2="high:Q",
            color=_colour(UNITS, FAR),
            tooltip=_tips(title, alt.Tooltip("steps:N", title="step")),
        )
    )
    height = min(256, max(64, ROW * (len(row_edges(num_workers)) - 1)))
    shown = _spaced(named, ARROW * num_workers / height)
    arrows = (
        alt.Chart(tables.add([{"low": rank, "label": f"← {rank}"} for rank in shown]))
        .mark_text(style="named-label", align="left", dx=4)
        .encode(x=alt.value("width"), y=y, text="label:N")
    )
    return finish([cells, *([arrows] if named else [])], width, height)


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
) -> alt.LayerChart:
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
    axis = alt.Axis(title=None, labelLimit=150, domain=False, ticks=False, grid=False)
    cells = (
        _flat(tables, rows, "group", num_workers)
        .mark_rect(style="cell" if num_workers <= 24 else "crowded-cell")
        .encode(
            x=alt.X("low:Q", axis=_rank_axis(), scale=_rank_scale(num_workers)),
            x2="high:Q",
            y=alt.Y("group:N", sort=order, axis=axis, scale=alt.Scale(padding=0)),
            color=_colour(legend, far),
            tooltip=_tips(title, alt.Tooltip("group:N", title="group")),
        )
    )
    return finish([cells], width, GROUP_ROW * len(rows))


def _flat(tables: Tables, rows: Sequence[Row], key: str, num_workers: int) -> alt.Chart:
    """Return the base of a map: one datum per cell, from rank ``low`` to rank ``high``."""
    cells = len(row_edges(num_workers)) - 1
    at = "(datum.at - 1)"
    return (
        alt.Chart(tables.add(rows))
        .transform_flatten(["deviation", "value", "rank"])
        .transform_window(at="row_number()", groupby=[key])
        .transform_calculate(
            low=f"floor({at} * {num_workers} / {cells}) - 0.5",
            high=f"floor(({at} + 1) * {num_workers} / {cells}) - 0.5",
        )
        .transform_filter("isValid(datum.deviation)")
    )


def _rank_axis() -> alt.Axis:
    return alt.Axis(title="rank", format=",d", tickMinStep=1, tickCount=8, grid=False, domain=False)


def _rank_scale(num_workers: int, *, reverse: bool = False) -> alt.Scale:
    ends = [-0.5, num_workers - 0.5]
    return alt.Scale(domain=ends, nice=False, zero=False, round=True, reverse=reverse)


def _colour(title: str, far: float) -> alt.Color:
    scale = alt.Scale(domain=[-far, far], domainMid=0, clamp=True, interpolate="rgb")
    legend = alt.Legend(
        title=title,
        orient="top",
        direction="horizontal",
        titleOrient="left",
        titleLimit=260,
        gradientLength=120,
        gradientThickness=8,
        values=[-far, 0, far],
        labelExpr="(datum.value > 0 ? '+' : '') + datum.label",
        offset=6,
    )
    return alt.Color("deviation:Q", scale=scale, legend=legend)


def _tips(title: str, place: alt.Tooltip) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("rank:Q", title="rank", format=",d"),
        place,
        alt.Tooltip("value:Q", title=title, format=".4~g"),
        alt.Tooltip("deviation:Q", title="apart", format="+.2~f"),
    ]
