"""The curves of one run, each defined once, for the page and for PNG files alike.

A figure holds data and roles; colours come from the configuration in ``document``. On the page, the
script shares a parameter ``pinned`` (a rank) among all figures that have one.
"""

from collections.abc import Sequence
from typing import Any

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
    step_axis,
    step_tip,
    tip,
    zoomable,
)
from rankscope.report.series import Row

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
    """Return the averaged loss over the band from the lowest to the highest worker.

    ``mean`` has rows ``{step, value, low, high}``, ``ranges`` has rows ``{step, low, high}``.
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
    return _with_crosshair([area, line], tips, source, 250)


def metric(
    tables: Tables, rows: Sequence[Row], title: str, *, expected: Sequence[Row] = ()
) -> Spec:
    """Return one dispersion metric over time, with the expectation from sampling alone, dashed.

    Both have rows ``{step, value}``; ``title`` is the name of the value in the tooltip.
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
    """Return the step's time and the monitor's part of it in milliseconds, logarithmic.

    Rows are ``{step, value}``, in milliseconds; a step's time is that of the slowest worker.
    """
    encoding = {
        "x": step_axis(),
        "y": log_axis("value", log_domain(column([*step, *monitor], "value")), form=",~g"),
    }
    layers: list[Spec] = []
    names: list[Spec] = []
    for rows, style, words, label in (
        (step, "mean", "step", "ink-label"),
        (monitor, "measured", "monitor", "measured-label"),
    ):
        known = [row for row in rows if (row["value"] or 0) > 0]
        source = tables.add(known)
        tips = [step_tip(), tip("value", f"{words}, ms")]
        layers.append(layer("line", source, encoding, style=style, strokeWidth=1.6))
        layers.append(layer("point", source, {**encoding, "tooltip": tips}, opacity=0, size=60))
        if known:
            name = {"text": words, "align": "right", "dy": -10}
            last = tables.add(known[-1:])
            names += [layer("text", last, encoding, style=s, **name) for s in ("halo", label)]
    layers += names  # in front of both curves
    return layered(layers, COST_HEIGHT)


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
    """Return one signal of every worker, from rows ``{step, rank, value}``.

    The ranks that findings name stand out, the pinned one is in front; ``title`` is the name of the
    value in the tooltip.
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
    near = pointed("near", points, ["rank"])
    params = [{"name": "pinned", "value": -1}, near, zoomable(points)]
    return layered([*layers, points], 190, params)


def worker_deviations(tables: Tables, rows: Sequence[Row], named: Sequence[int] = ()) -> Spec:
    """Return how far each worker lies from the mean of all, on average over the run.

    Rows are ``{rank, value, low, high}``; ``named`` are ranks that a finding names.
    """
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
