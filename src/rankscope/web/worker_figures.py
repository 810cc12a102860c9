"""Figures with every worker in them: their lines over time, and how far each lies from the mean."""

from collections.abc import Sequence

from rankscope.web.parts import (
    Spec,
    Tables,
    Width,
    channel,
    layer,
    layered,
    pointed,
    step_axis,
    step_tip,
    tip,
)
from rankscope.web.series import Row


def worker_lines(
    tables: Tables,
    rows: Sequence[Row],
    title: str,
    named: Sequence[int] = (),
    *,
    width: Width = "container",
    height: int = 190,
) -> Spec:
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
    params = [{"name": "pinned", "value": -1}, pointed("near", points, ["rank"])]
    return layered([*layers, points], width, height, params)


def worker_deviations(
    tables: Tables,
    rows: Sequence[Row],
    named: Sequence[int] = (),
    *,
    width: Width = "container",
    height: int = 110,
) -> Spec:
    """Return how far each worker lies from the mean of all, on average over the run.

    Args:
        tables: Keeps the data.
        rows: Rows ``{rank, value, low, high}``.
        named: Ranks that a finding names.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    source = tables.add(rows)
    axis = {"title": "rank", "format": ",d", "tickMinStep": 1, "tickCount": 8}
    ranks = [row["rank"] for row in rows]
    ends = [min(ranks, default=0) - 0.5, max(ranks, default=0) + 0.5]
    x = channel("rank:Q", axis=axis, scale={"domain": ends, "nice": False})
    y = channel("value:Q", axis={"title": None, "tickCount": 3})
    tips = [channel("rank:O", title="rank"), tip("value", "mean difference")]
    encoding = {"x": x, "y": y, "tooltip": tips}
    bars = {"x": x, "y": channel("low:Q"), "y2": {"field": "high"}}
    dot = {"filled": True, "opacity": 1}
    layers = [
        layer("rule", tables.add([{"value": 0}]), {"y": y}, style="expected"),
        layer("rule", source, bars, style="whisker"),
        layer("point", source, encoding, style="dot", size=34, **dot),
    ]
    if named:
        mine = _members(named)
        layers.append(layer("point", source, encoding, mine, style="named-dot", size=44, **dot))
    return layered(layers, width, height)


def _members(ranks: Sequence[int]) -> Spec:
    return {"filter": {"field": "rank", "oneOf": list(ranks)}}
