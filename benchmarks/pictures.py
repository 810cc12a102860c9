"""The pictures of the pages on metrics: one metric in three runs of the fault bench, side by side.

::

    python -m benchmarks.faults H1 D5 D20 --keep pictures
    python benchmarks/pictures.py pictures docs/assets
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.evidence import Table
from rankscope.record import Run
from rankscope.record.rollups import bins_of_steps
from rankscope.report import figures, series
from rankscope.report.document import png_of
from rankscope.report.parts import Tables, sized

RUNS = {
    "H1-w4-s0": "healthy",
    "D5-w4-s0": "all workers read the same batches",
    "D20-w4-s0": "random labels on rank 1",
}
METRICS = {
    "loss-dispersion": ("loss_std", "std of the losses over workers, nats per token"),
    "gradient-norm-dispersion": ("grad_norm_std", "std of the gradient norms over workers"),
    "direction-consistency": ("cosine_mean", "mean cosine over pairs of workers"),
    "norm-weighted-cosine": ("cosine_weighted", "mean cosine over pairs, weighted by norms"),
    "distinct-samples": ("samples_distinct", "different samples in a step, of 16 drawn"),
}
WIDTH, HEIGHT = 250, 190


def panel(tables: Tables, run: Run, name: str, title: str, number: int) -> dict[str, Any]:
    """Return one metric of one run; names inside are the panel's own."""
    columns = run.columns(Table.STEPS, "step", name)
    rows = series.curve(columns["step"], np.asarray(columns[name], np.float64))
    chart = sized(figures.metric(tables, rows, "value"), WIDTH, HEIGHT)
    text = json.dumps({**chart, "title": title})
    return dict(json.loads(text.replace('"at"', f'"at{number}"')))


def set_domain(spec: Any, domain: Sequence[float]) -> None:
    """Give all vertical axes of a figure the same ends."""
    for value in spec.values() if isinstance(spec, dict) else spec:
        if isinstance(value, dict | list):
            set_domain(value, domain)
    if isinstance(spec, dict) and "scale" in spec.get("y", {}):
        spec["y"]["scale"] = {"domain": list(domain)}


def main() -> None:
    """Write the pictures."""
    kept, folder = Path(sys.argv[1]), Path(sys.argv[2])
    runs = {name: Run.open(kept / name) for name in RUNS}
    for file, (column, words) in METRICS.items():
        tables = Tables()
        values = [run.columns(Table.STEPS, column)[column] for run in runs.values()]
        flat = np.concatenate([np.asarray(value, np.float64) for value in values])
        panels = [panel(tables, runs[key], column, RUNS[key], i) for i, key in enumerate(RUNS)]
        spec = {"hconcat": panels, "title": words}
        set_domain(spec, (min(0.0, float(np.nanmin(flat))), 1.05 * float(np.nanmax(flat))))
        (folder / f"{file}.png").write_bytes(png_of(spec, tables, scale=1.5))
    tables = Tables()
    steps, values_TW = runs["D20-w4-s0"].per_worker("cosine_rest")
    smooth_TW = np.apply_along_axis(np.convolve, 0, values_TW, np.full(10, 0.1), "valid")
    lines = series.lines(bins_of_steps(steps[9:], smooth_TW), range(values_TW.shape[1]))
    title = "each worker's cosine with the sum of the others, mean of 10 steps; rank 1 stands out"
    chart = sized(figures.worker_lines(tables, lines, "cosine", [1]), 820, HEIGHT)
    picture = png_of({**chart, "title": title}, tables, scale=1.5)
    (folder / "one-against-the-rest.png").write_bytes(picture)


if __name__ == "__main__":
    main()
