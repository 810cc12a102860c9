"""The page and the figures of two runs compared: how far they lie apart, step by step."""

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import numpy as np

from rankscope.numerics.diff import Comparison
from rankscope.numerics.diff.words import named
from rankscope.web.document import png_of, render, spec_of, write_bytes, write_text
from rankscope.web.parts import Tables, Width, finish, step_axis, tip
from rankscope.web.series import Row

MAX_POINTS = 2000
"""Steps of a curve that are drawn; of longer ones an even choice, with the first and the last."""

MAX_BARS = 20
"""Tensors that are drawn, those farthest apart."""

_CURVES = ("loss", "gradient", "parameters")


def write_diff_page(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as one HTML file that opens offline.

    Raises:
        RunError: The file cannot be written.
    """
    tables = Tables()
    figures = {}
    if not comparison.identical and _rows(comparison):
        figures["apart"] = spec_of(distances(tables, comparison))
    if comparison.tensors:
        figures["tensors"] = spec_of(tensor_bars(tables, comparison))
    title = f"{Path(comparison.run_a).name} and {Path(comparison.run_b).name}"
    tone = {"identical": "healthy", "rounding": "note", "bug-like jump": "error"}
    context = {
        "title": title,
        "severity": tone.get(comparison.kind, "warning"),
        "comparison": comparison,
        "changes": [named(change) for change in comparison.changes],
        "figure_names": tuple(figures),
    }
    return write_text(path, render("diff.html", context, figures, tables))


def write_diff_figure(comparison: Comparison, path: Path) -> Path:
    """Write the distances over the steps as a PNG file.

    Raises:
        RunError: The file cannot be written.
    """
    tables = Tables()
    chart = distances(tables, comparison, width=760, height=320)
    title = alt.TitleParams(str(comparison.kind).capitalize(), subtitle=[comparison.headline])
    return write_bytes(path, png_of(chart.properties(title=title), tables))


def distances(
    tables: Tables, comparison: Comparison, *, width: Width = "container", height: int = 300
) -> alt.LayerChart:
    """Return the relative distance of losses, gradients and parameters over the steps.

    The vertical axis is logarithmic; steps in which a curve is 0 have no point. A line marks the
    step in which the runs first part, a dashed one what rounding predicts for the reduction there.

    Args:
        tables: Keeps the data.
        comparison: What is drawn.
        width: Pixels or ``"container"``.
        height: Pixels.
    """
    rows = _rows(comparison)
    source = tables.add(rows)
    y = alt.Y("value:Q", scale=alt.Scale(type="log", nice=True), axis=_powers(rows))
    names = [curve.name for curve in comparison.curves]
    scale = alt.Scale(domain=[name for name in _CURVES if name in names])
    legend = alt.Legend(title=None, orient="top")
    colour = alt.Color("curve:N", scale=scale, legend=legend)
    tips = [alt.Tooltip("step:Q", title="step", format=",d"), alt.Tooltip("curve:N", title="of")]
    steps = comparison.alignment.steps_a
    x = step_axis(domain=[int(steps[0]), int(steps[-1])])
    base = alt.Chart(source).encode(x=x, y=y, color=colour)
    layers = [
        base.mark_line(style="setting", strokeWidth=1.8),
        base.mark_point(filled=True, size=22, opacity=1).encode(
            tooltip=[*tips, tip("value", "relative distance")]
        ),
    ]
    return finish([*_marks(tables, comparison), *layers], width, height)


def _marks(tables: Tables, comparison: Comparison) -> list[alt.Chart]:
    parting = comparison.parting
    if parting is None:
        return []
    at = tables.add([{"step": parting.step}])
    marks = [alt.Chart(at).mark_rule(style="crosshair").encode(x=step_axis())]
    if np.isfinite(parting.predicted) and parting.predicted > 0:
        level = tables.add([{"value": float(f"{parting.predicted:.4g}")}])
        marks.append(alt.Chart(level).mark_rule(style="expected").encode(y="value:Q"))
    if comparison.jump is not None:
        jump = tables.add([{"step": comparison.jump.step}])
        marks.append(alt.Chart(jump).mark_rule(style="named").encode(x=step_axis()))
    return marks


def tensor_bars(
    tables: Tables, comparison: Comparison, *, width: Width = "container"
) -> alt.LayerChart:
    """Return the tensors that lie farthest apart where the runs first part."""
    known = [(n, v) for n, v in comparison.tensors.items() if np.isfinite(v) and v > 0][:MAX_BARS]
    rows: list[Row] = [{"tensor": name, "value": float(f"{v:.4g}")} for name, v in known]
    x = alt.X("value:Q", scale=alt.Scale(type="log", nice=True), axis=_powers(rows))
    order = [str(row["tensor"]) for row in rows]
    y = alt.Y("tensor:N", sort=order, axis=alt.Axis(title=None, labelLimit=280))
    dots = alt.Chart(tables.add(rows)).mark_point(style="dot", filled=True, size=60)
    tips = [alt.Tooltip("tensor:N", title="tensor"), tip("value", "relative distance")]
    return finish([dots.encode(x=x, y=y, tooltip=tips)], width, max(60, 18 * len(rows)))


def _powers(rows: Sequence[Row]) -> alt.Axis:
    """Return an axis with a line at each power of ten, or at some where there are many."""
    logs = np.log10([row["value"] for row in rows] or [1.0])
    low, high = int(np.floor(logs.min())), int(np.ceil(logs.max()))
    every = max(1, (high - low) // 8)
    values = [float(f"1e{power}") for power in range(low, high + 1, every)]
    return alt.Axis(title="relative distance", format=".0e", values=values)


def _rows(comparison: Comparison) -> list[Row]:
    rows: list[Row] = []
    for curve in comparison.curves:
        known = np.flatnonzero(np.isfinite(curve.values) & (curve.values > 0))
        rows += [
            {
                "step": int(curve.steps[at]),
                "value": float(f"{curve.values[at]:.4g}"),
                "curve": curve.name,
            }
            for at in known[_chosen(len(known))]
        ]
    return rows


def _chosen(count: int) -> Sequence[int]:
    if count <= MAX_POINTS:
        return list(range(count))
    return [int(at) for at in np.unique(np.linspace(0, count - 1, MAX_POINTS).astype(int))]
