"""The findings of a run on its steps: one row each, in the order of the list of findings.

On the page, the script reads the parameter ``finding``: a click on a row sets it to
``{anchor: [id]}``, where id is that of the finding's article.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.web.parts import (
    Spec,
    Tables,
    Width,
    channel,
    layer,
    layered,
    pointed,
    step_axis,
)
from rankscope.web.series import Row

ROW = 28
"""Pixels of a row; the page's list of names beside the figure has lines of that height."""
MAX_ROWS = 40
SHAPES = {"note": "circle", "warning": "triangle-up", "error": "diamond"}


def timeline_rows(findings: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows of the timeline from what the page shows of the findings, in their order."""
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
        for index, finding in enumerate(findings[:MAX_ROWS])
    ]


def timeline(
    tables: Tables,
    rows: Sequence[Row],
    steps: Sequence[int],
    *,
    width: Width = "container",
) -> Spec:
    """Return the findings as spans of steps, by severity in colour and shape.

    Args:
        tables: Keeps the data.
        rows: As :func:`timeline_rows` returns them.
        steps: First and last step of the run.
        width: Pixels or ``"container"``.
    """
    domain = [min([steps[0], *(r["first"] for r in rows)]), max([steps[1], *_lasts(rows)])]
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
    return layered([*layers, target], width, ROW * len(rows), [clicked])


def _lasts(rows: Sequence[Row]) -> list[int]:
    return [row["last"] for row in rows]
