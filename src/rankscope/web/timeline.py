"""The findings of a run on its steps: one row each, in the order of the list of findings.

On the page, the script reads the parameter ``finding``: a click on a row sets it to
``{anchor: [id]}``, where id is that of the finding's article.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from rankscope.web.parts import Tables, Width, finish, step_axis
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
) -> alt.LayerChart:
    """Return the findings as spans of steps, by severity in colour and shape.

    Args:
        tables: Keeps the data.
        rows: As :func:`timeline_rows` returns them.
        steps: First and last step of the run.
        width: Pixels or ``"container"``.
    """
    domain = [min([steps[0], *(r["first"] for r in rows)]), max([steps[1], *_lasts(rows)])]
    x = step_axis(field="first").scale(domain=domain, nice=False, zero=False)
    y = alt.Y("at:O", axis=None, scale=alt.Scale(padding=0))
    source = tables.add(rows)
    base = alt.Chart(source).encode(y=y)
    clicked = alt.selection_point(name="finding", fields=["anchor"], on="click", empty=False)
    tips = [
        alt.Tooltip("title:N", title="finding"),
        alt.Tooltip("severity:N", title="severity"),
        alt.Tooltip("ranks:N", title="where"),
        alt.Tooltip("steps:N", title="when"),
        alt.Tooltip("explanation:N", title="what"),
    ]
    layers = [base.mark_rule(style="guide").encode(x=alt.value(0), x2=alt.value("width"))]
    for severity, shape in SHAPES.items():
        if any(row["severity"] == severity for row in rows):
            own = base.transform_filter(alt.FieldEqualPredicate(field="severity", equal=severity))
            layers.append(own.mark_rule(style=f"{severity}-span").encode(x=x, x2="last:Q"))
            sign = own.mark_point(
                style=f"{severity}-sign",
                shape=shape,
                filled=severity != "note",
                size=90,
                opacity=1,
            )
            layers.append(sign.encode(x=x))
    target = base.mark_rect(opacity=0, cursor="pointer").encode(
        x=alt.value(0), x2=alt.value("width"), tooltip=tips
    )
    layers.append(target.add_params(clicked))
    return finish(layers, width, ROW * len(rows))


def _lasts(rows: Sequence[Row]) -> list[int]:
    return [row["last"] for row in rows]
