"""Figures with every worker in them: their lines over time, and how far each lies from the mean."""

from collections.abc import Sequence

import altair as alt

from rankscope.web.parts import Tables, Width, finish, step_axis, tip
from rankscope.web.series import Row


def worker_lines(
    tables: Tables,
    rows: Sequence[Row],
    title: str,
    named: Sequence[int] = (),
    *,
    width: Width = "container",
    height: int = 190,
) -> alt.LayerChart:
    """Return one signal of every worker; named ranks stand out, the pinned one is in front.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, rank, value}``.
        title: Name of the value where the pointer is.
        named: Ranks that a finding names.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    source = tables.add(rows)
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(zero=False))
    pinned = alt.param(name="pinned", value=-1)
    near = alt.selection_point(
        name="near",
        nearest=True,
        on="pointerover",
        clear="pointerout",
        fields=["rank"],
        empty=False,
    )
    base = alt.Chart(source).encode(x=step_axis(), y=y, detail="rank:N")
    members = alt.FieldOneOfPredicate(field="rank", oneOf=list(named))
    tips = [
        alt.Tooltip("rank:O", title="rank"),
        alt.Tooltip("step:Q", title="step", format=",d"),
        tip("value", title),
    ]
    drawn = len({row["rank"] for row in rows})
    opacity = min(0.7, max(0.14, 7 / max(drawn, 1)))
    layers = [base.mark_line(style="worker", strokeOpacity=opacity).add_params(pinned)]
    if named:
        layers.append(base.mark_line(style="named").transform_filter(members))
    layers.append(base.mark_line(style="focus").transform_filter("datum.rank === pinned"))
    layers.append(base.mark_point(opacity=0, size=30).encode(tooltip=tips).add_params(near))
    return finish(layers, width, height)


def worker_deviations(
    tables: Tables,
    rows: Sequence[Row],
    named: Sequence[int] = (),
    *,
    width: Width = "container",
    height: int = 110,
) -> alt.LayerChart:
    """Return how far each worker lies from the mean of all, on average over the run.

    Args:
        tables: Keeps the data.
        rows: Rows ``{rank, value, low, high}``.
        named: Ranks that a finding names.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    base = alt.Chart(tables.add(rows))
    axis = alt.Axis(title="rank", format=",d", tickMinStep=1, tickCount=8)
    ranks = [row["rank"] for row in rows]
    ends = [min(ranks, default=0) - 0.5, max(ranks, default=0) + 0.5]
    x = alt.X("rank:Q", axis=axis, scale=alt.Scale(domain=ends, nice=False))
    y = alt.Y("value:Q", axis=alt.Axis(title=None, tickCount=3))
    tips = [alt.Tooltip("rank:O", title="rank"), tip("value", "mean difference")]
    dots = base.mark_point(style="dot", filled=True, opacity=1, size=34).encode(
        x=x, y=y, tooltip=tips
    )
    zero = alt.Chart(tables.add([{"value": 0}])).mark_rule(style="expected").encode(y=y)
    bars = base.mark_rule(style="whisker").encode(x=x, y=alt.Y("low:Q"), y2="high:Q")
    layers = [zero, bars, dots]
    if named:
        members = alt.FieldOneOfPredicate(field="rank", oneOf=list(named))
        layers.append(
            base.transform_filter(members)
            .mark_point(style="named-dot", filled=True, opacity=1, size=44)
            .encode(x=x, y=y, tooltip=tips)
        )
    return finish(layers, width, height)
