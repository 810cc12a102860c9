"""The pages of ``rankscope diff`` and ``rankscope parity``: two trainings compared."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rankscope.report.document import png_of, render, write_bytes
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
    sized,
    step_axis,
    step_tip,
    tip,
    titled,
)
from rankscope.report.series import Row
from rankscope.stats.arrays import evenly
from rankscope.tools.diff import Comparison
from rankscope.tools.diff.classes import named
from rankscope.tools.parity.result import Answer, Kind

MAX_POINTS = 2000  # of a curve that are drawn, evenly chosen, the first and the last among them

MAX_BARS = 20  # tensors that are drawn, those farthest apart

_NAMES: Spec = {"title": None, "labelLimit": {"expr": "min(280, 0.45 * containerSize()[0])"}}
"""The axis of tensors' names, which leaves a narrow page room for the picture."""

_CURVES = ("loss", "gradient", "parameters")


def write_diff_page(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as one HTML file that opens offline."""
    tables = Tables()
    figures = {}
    if not comparison.identical and _rows(comparison):
        figures["apart"] = distances(tables, comparison)
    if comparison.tensors:
        figures["tensors"] = tensor_bars(tables, comparison)
    title = f"{Path(comparison.run_a).name} and {Path(comparison.run_b).name}"
    tone = {"identical": "healthy", "rounding": "note", "bug-like jump": "error"}
    context = {
        "title": title,
        "severity": tone.get(comparison.kind, "warning"),
        "comparison": comparison,
        "changes": [named(change) for change in comparison.changes],
        "figure_names": tuple(figures),
    }
    return write_bytes(path, render("diff.html", context, figures, tables).encode())


def write_diff_figure(comparison: Comparison, path: Path) -> Path:
    """Write the distances over the steps as a PNG file."""
    tables = Tables()
    chart = sized(distances(tables, comparison), 760, 320)
    words = str(comparison.kind).capitalize(), comparison.headline
    return write_bytes(path, png_of(titled(chart, *words), tables))


def distances(tables: Tables, comparison: Comparison) -> Spec:
    """Return the relative distance of losses, gradients and parameters over the steps.

    The vertical axis is logarithmic; steps in which a curve is 0 have no point. A line marks the
    step in which the runs first part, a dashed one what rounding predicts for the reduction there.
    """
    rows = _rows(comparison)
    source = tables.add(rows)
    names = [curve.name for curve in comparison.curves]
    scale = {"domain": [name for name in _CURVES if name in names]}
    steps = comparison.alignment.steps_a
    place = {
        "x": step_axis(domain=[int(steps[0]), int(steps[-1])]),
        "y": log_axis("value", log_domain(column(rows, "value")), "relative distance"),
        "color": channel("curve:N", scale=scale, legend={"title": None, "orient": "top"}),
    }
    tips = [step_tip(), channel("curve:N", title="of"), tip("value", "relative distance")]
    layers = [
        layer("line", source, place, style="setting", strokeWidth=1.8),
        layer("point", source, {**place, "tooltip": tips}, size=22, **DOT),
    ]
    return layered([*_marks(tables, comparison), *layers], 300)


def _marks(tables: Tables, comparison: Comparison) -> list[Spec]:
    parting = comparison.parting
    if parting is None:
        return []
    x = {"x": step_axis()}
    marks = [layer("rule", tables.add([{"step": parting.step}]), x, style="crosshair")]
    if np.isfinite(parting.predicted) and parting.predicted > 0:
        level = tables.add([{"value": float(f"{parting.predicted:.4g}")}])
        marks.append(layer("rule", level, {"y": channel("value:Q")}, style="expected"))
    if comparison.jump is not None:
        jump = tables.add([{"step": comparison.jump.step}])
        marks.append(layer("rule", jump, x, style="named"))
    return marks


def tensor_bars(tables: Tables, comparison: Comparison) -> Spec:
    """Return the tensors that lie farthest apart where the runs first part."""
    known = [(n, v) for n, v in comparison.tensors.items() if np.isfinite(v) and v > 0][:MAX_BARS]
    rows: list[Row] = [{"tensor": name, "value": float(f"{v:.4g}")} for name, v in known]
    order = [str(row["tensor"]) for row in rows]
    encoding = {
        "x": log_axis("value", log_domain(column(rows, "value")), "relative distance"),
        "y": channel("tensor:N", sort=order, axis=_NAMES),
        "tooltip": [channel("tensor:N", title="tensor"), tip("value", "relative distance")],
    }
    dots = layer("point", tables.add(rows), encoding, style="dot", filled=True, size=60)
    return layered([dots], max(60, 18 * len(rows)))


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
            for at in known[evenly(len(known), MAX_POINTS)]
        ]
    return rows


_FAR = 100.0
_ROW = 16
_MOST_ROWS = 200

_TONES = {Kind.SAME: "healthy", Kind.DIFFERENT: "error", Kind.NOT_COMPARABLE: "warning"}


def write_parity_page(answer: Answer, path: Path, sides: Mapping[str, str]) -> Path:
    """Write an answer as one HTML file that opens offline; ``sides`` are the commands by name."""
    tables = Tables()
    figures = {"apart": cells_of_parity(tables, answer)} if answer.curves else {}
    context = {
        "title": "Two layouts compared",
        "severity": _TONES[answer.kind],
        "answer": answer,
        "sides": sides,
        "figure_names": tuple(figures),
    }
    return write_bytes(path, render("parity.html", context, figures, tables).encode())


def cells_of_parity(tables: Tables, answer: Answer) -> Spec:
    """Return distance over bound of every parameter and step; beyond 1 it is more than rounding."""
    names = sorted(answer.curves, key=lambda name: -max(answer.curves[name]))[:_MOST_ROWS]
    order = [name for name in answer.curves if name in names]
    rows: list[Row] = [
        {"parameter": name, "step": str(step), "ratio": _shown(ratio)}
        for name in order
        for step, ratio in enumerate(answer.curves[name])
    ]
    scale = {"type": "log", "domain": [1 / _FAR, 1, _FAR], "clamp": True, "interpolate": "rgb"}
    encoding = {
        "x": channel("step:O", axis={"title": "step", "labelAngle": 0}),
        "y": channel("parameter:N", sort=order, axis=_NAMES),
        "color": channel(
            "ratio:Q",
            scale={**scale, "scheme": "redblue", "reverse": True},
            legend={"title": "distance over rounding", "orient": "top"},
        ),
        "tooltip": [
            channel("parameter:N", title="parameter"),
            channel("step:O", title="step"),
            tip("ratio", "distance over rounding"),
        ],
    }
    cells = layer("rect", tables.add(rows), encoding, style="cell")
    return layered([cells], max(60, _ROW * len(order)))


def _shown(ratio: float) -> float:
    if math.isnan(ratio) or math.isinf(ratio):
        return 1e9
    return float(f"{max(ratio, 1e-9):.4g}")
