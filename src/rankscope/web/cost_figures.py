"""Figures of the reduction's accuracy and of what the monitor costs."""

import math
from collections.abc import Sequence

from rankscope.web.parts import (
    Spec,
    Tables,
    Width,
    channel,
    layer,
    layered,
    step_axis,
    step_tip,
    tip,
)
from rankscope.web.series import Row

HEIGHT = 150


def residual(
    tables: Tables, rows: Sequence[Row], *, width: Width = "container", height: int = HEIGHT
) -> Spec:
    """Return the reduction's residual over time, on a logarithmic scale.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, value}``; values above 0 are drawn.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    source, positive = tables.add(rows), {"filter": "datum.value > 0"}
    encoding = {"x": step_axis(), "y": _logarithmic(rows, ".0e")}
    dots = {**encoding, "tooltip": [step_tip(), tip("value", "residual")]}
    dot = {"style": "dot", "filled": True, "size": 26, "opacity": 0.9}
    layers = [
        layer("line", source, encoding, positive, style="measured"),
        layer("point", source, dots, positive, **dot),
    ]
    return layered(layers, width, height)


def time_per_step(
    tables: Tables,
    step: Sequence[Row],
    monitor: Sequence[Row],
    *,
    width: Width = "container",
    height: int = HEIGHT,
) -> Spec:
    """Return the step's time and the monitor's part of it in milliseconds, logarithmic.

    Args:
        tables: Keeps the data.
        step: Rows ``{step, value}``: the slowest worker's time of each step, in milliseconds.
        monitor: Rows ``{step, value}``: the time that the monitor took of it.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    encoding = {"x": step_axis(), "y": _logarithmic([*step, *monitor], ",~g")}
    layers: list[Spec] = []
    for rows, style, words, label in (
        (step, "mean", "step", "ink-label"),
        (monitor, "measured", "monitor", "measured-label"),
    ):
        known = _positive(rows)
        source, tips = tables.add(known), [step_tip(), tip("value", f"{words}, ms")]
        layers.append(layer("line", source, encoding, style=style, strokeWidth=1.6))
        layers.append(layer("point", source, {**encoding, "tooltip": tips}, opacity=0, size=60))
        if known:
            name = {"style": label, "text": words, "align": "right", "dy": -10}
            layers.append(layer("text", tables.add(known[-1:]), encoding, **name))
    return layered(layers, width, height)


def interval(
    tables: Tables, rows: Sequence[Row], *, width: Width = "container", height: int = HEIGHT
) -> Spec:
    """Return how many steps lay between two measurements of the gradients, over time.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, value}``.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    axis = {"title": None, "format": ",d", "tickMinStep": 1, "tickCount": 4}
    y = channel("value:Q", axis=axis, scale={"zero": True, "nice": True})
    source, encoding = tables.add(rows), {"x": step_axis(), "y": y}
    tips = [step_tip(), channel("value:Q", title="every … steps", format=",d")]
    layers = [
        layer("line", source, encoding, style="measured", interpolate="step-after"),
        layer("point", source, {**encoding, "tooltip": tips}, opacity=0, size=60),
    ]
    return layered(layers, width, height)


def _positive(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row["value"] or 0) > 0]


def _logarithmic(rows: Sequence[Row], form: str) -> Spec:
    """Return a logarithmic axis with a few lines: at powers of ten, or at 1, 2 and 5 times them."""
    known = [row["value"] for row in _positive(rows)] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    wide = high - low > 2
    values = [
        float(f"{digit}e{power}")
        for power in range(low, high + 1)
        for digit in ((1,) if wide else (1, 2, 5))
    ]
    below = [v for v in values if v <= min(known)]
    above = [v for v in values if v >= max(known)]
    domain = [max(below, default=min(known)), min(above, default=max(known))]
    if domain[0] == domain[1]:
        domain[1] *= 10
    axis = {"title": None, "format": form, "values": values}
    return channel("value:Q", axis=axis, scale={"type": "log", "domain": domain, "nice": False})
