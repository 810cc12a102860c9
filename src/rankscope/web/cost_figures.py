"""Figures of the reduction's accuracy and of what the monitor costs."""

import math
from collections.abc import Sequence

import altair as alt

from rankscope.web.parts import Tables, Width, finish, step_axis, tip
from rankscope.web.series import Row

HEIGHT = 150


def residual(
    tables: Tables, rows: Sequence[Row], *, width: Width = "container", height: int = HEIGHT
) -> alt.LayerChart:
    """Return the reduction's residual over time, on a logarithmic scale.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, value}``; values above 0 are drawn.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    y = _logarithmic(rows, ".0e")
    base = alt.Chart(tables.add(rows)).transform_filter("datum.value > 0").encode(x=step_axis())
    tips = [alt.Tooltip("step:Q", title="step", format=",d"), tip("value", "residual")]
    dots = base.mark_point(style="dot", filled=True, size=26, opacity=0.9)
    layers = [base.mark_line(style="measured").encode(y=y), dots.encode(y=y, tooltip=tips)]
    return finish(layers, width, height)


def time_per_step(
    tables: Tables,
    step: Sequence[Row],
    monitor: Sequence[Row],
    *,
    width: Width = "container",
    height: int = HEIGHT,
) -> alt.LayerChart:
    """Return the step's time and the monitor's part of it in milliseconds, logarithmic.

    Args:
        tables: Keeps the data.
        step: Rows ``{step, value}``: the slowest worker's time of each step, in milliseconds.
        monitor: Rows ``{step, value}``: the time that the monitor took of it.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    y = _logarithmic([*step, *monitor], ",~g")
    layers: list[alt.Chart] = []
    for rows, style, words, label in (
        (step, "mean", "step", "ink-label"),
        (monitor, "measured", "monitor", "measured-label"),
    ):
        known = _positive(rows)
        base = alt.Chart(tables.add(known)).encode(x=step_axis(), y=y)
        tips = [alt.Tooltip("step:Q", title="step", format=",d"), tip("value", f"{words}, ms")]
        layers.append(base.mark_line(style=style, strokeWidth=1.6))
        layers.append(base.mark_point(opacity=0, size=60).encode(tooltip=tips))
        if known:
            end = alt.Chart(tables.add(known[-1:])).encode(x=step_axis(), y=y)
            layers.append(end.mark_text(style=label, text=words, align="right", dy=-10))
    return finish(layers, width, height)


def interval(
    tables: Tables, rows: Sequence[Row], *, width: Width = "container", height: int = HEIGHT
) -> alt.LayerChart:
    """Return how many steps lay between two measurements of the gradients, over time.

    Args:
        tables: Keeps the data.
        rows: Rows ``{step, value}``.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    axis = alt.Axis(title=None, format=",d", tickMinStep=1, tickCount=4)
    y = alt.Y("value:Q", axis=axis, scale=alt.Scale(zero=True, nice=True))
    base = alt.Chart(tables.add(rows)).encode(x=step_axis(), y=y)
    tips = [
        alt.Tooltip("step:Q", title="step", format=",d"),
        alt.Tooltip("value:Q", title="every … steps", format=",d"),
    ]
    layers = [
        base.mark_line(style="measured", interpolate="step-after"),
        base.mark_point(opacity=0, size=60).encode(tooltip=tips),
    ]
    return finish(layers, width, height)


def _positive(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row["value"] or 0) > 0]


def _logarithmic(rows: Sequence[Row], form: str) -> alt.Y:
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
    axis = alt.Axis(title=None, format=form, values=values)
    return alt.Y("value:Q", axis=axis, scale=alt.Scale(type="log", domain=domain, nice=False))
