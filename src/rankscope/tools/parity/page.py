"""The page of a comparison: parameters down, steps across, distance over what rounding explains."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.report.document import render, write_text
from rankscope.report.parts import Spec, Tables, channel, layer, layered, tip
from rankscope.tools.parity.result import Answer, Kind

if TYPE_CHECKING:
    from rankscope.report.series import Row

_FAR = 100.0
_ROW = 16
_MOST_ROWS = 200

_TONES = {Kind.SAME: "healthy", Kind.DIFFERENT: "error", Kind.NOT_COMPARABLE: "warning"}


def write_parity_page(answer: Answer, path: Path, sides: Mapping[str, str]) -> Path:
    """Write an answer as one HTML file that opens offline; ``sides`` are the commands by name."""
    tables = Tables()
    figures = {"apart": distances(tables, answer)} if answer.curves else {}
    context = {
        "title": "Two layouts compared",
        "severity": _TONES[answer.kind],
        "answer": answer,
        "sides": sides,
        "figure_names": tuple(figures),
    }
    return write_text(path, render("parity.html", context, figures, tables))


def distances(tables: Tables, answer: Answer) -> Spec:
    """Return distance over bound of every parameter and step; beyond 1 it is more than rounding."""
    names = sorted(answer.curves, key=lambda name: -max(answer.curves[name]))[:_MOST_ROWS]
    order = [name for name in answer.curves if name in names]
    rows: list[Row] = [
        {"parameter": name, "step": str(step), "ratio": _number(ratio)}
        for name in order
        for step, ratio in enumerate(answer.curves[name])
    ]
    scale = {"type": "log", "domain": [1 / _FAR, 1, _FAR], "clamp": True, "interpolate": "rgb"}
    encoding = {
        "x": channel("step:O", axis={"title": "step", "labelAngle": 0}),
        "y": channel("parameter:N", sort=order, axis={"title": None, "labelLimit": 280}),
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


def _number(ratio: float) -> float:
    if math.isnan(ratio) or math.isinf(ratio):
        return 1e9
    return float(f"{max(ratio, 1e-9):.4g}")
