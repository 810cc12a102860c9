"""The figures of a run: its tables read, thinned, and given to the figures' definitions.

Reading and drawing stay bounded at any length of a run and any number of workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.bus.evidence import Table
from rankscope.bus.step import MISSING_INT
from rankscope.record import Columns, Overview, Run
from rankscope.record.rollups import MAX_ROWS
from rankscope.report import bins, figures, maps, series
from rankscope.report.parts import Spec, Tables
from rankscope.report.series import Row
from rankscope.verdict.assessment import Assessment
from rankscope.verdict.dispersion import expected_cosines
from rankscope.verdict.words import TOKENS, number, ranks_in_words

WORKER_FIGURES = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("cosine_rest", "cosine with the others"),
    ("rollout_gap", "gap to the rollouts"),
)
"""Signals that are drawn worker by worker: column, and its name where the pointer is."""
MAP_FIGURES = (*WORKER_FIGURES, ("step_seconds", "seconds"))
"""Signals that are drawn as a map of workers and steps."""

OVERVIEWS = tuple(name for name, _ in MAP_FIGURES)
"""Columns of the workers that figures are made from."""

_GRADIENTS = ("grad_norm", "cosine_rest")
"""Signals of observed steps only."""

MAX_HEATMAP_WORKERS = 64
MAX_FRAMES = 400
"""Steps whose cosines are read, evenly chosen."""

_STEPS = (
    "step", "observed", "loss_mean", "loss_std", "loss_std_expected", "grad_norm_std",
    "cosine_mean", "reduction_residual", "overhead_seconds", "interval",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FigureSource:
    """The data of the figures of one run.

    ``overviews`` are the workers' signals over the whole run, by name; ``named`` are ranks that
    findings name and that stand out (empty when most are named); ``drawn`` have lines of their own.
    """

    tables: Tables
    run: Run
    steps: Columns
    overviews: Mapping[str, Overview]
    named: Sequence[int]
    drawn: Sequence[int]

    @property
    def num_workers(self) -> int:
        """W: recorded ones included that ``run.json`` does not count."""
        return max((view.mean_BW.shape[1] for view in self.overviews.values()), default=0)

    def has(self, name: str) -> bool:
        """Return whether any worker has a finite value of a signal."""
        return bool(np.isfinite(self.overviews[name].mean_BW).any())


def read_source(tables: Tables, run: Run, named: Sequence[int]) -> FigureSource:
    """Read the data of a run's figures."""
    overviews = run.overviews(*OVERVIEWS)
    drawn = bins.chosen(bins.known_bins(overviews["loss"]), named)
    shown = [rank for rank in named if rank in drawn]
    return FigureSource(
        tables=tables,
        run=run,
        steps=run.steps(*_STEPS),
        overviews=overviews,
        named=shown if len(shown) <= max(1, run.num_workers // 2) else [],
        drawn=drawn,
    )


def run_figures(
    source: FigureSource,
    findings: Sequence[Mapping[str, Any]],
    assessment: Assessment,
    notes: dict[str, str],
) -> dict[str, Spec]:
    """Return the figures of a run by name; those without data are left out.

    ``findings`` are the page's, in its order; ``notes`` collects words for captions, by figure.
    """
    return (
        _timeline_figure(source, findings, notes)
        | _loss_figure(source, notes)
        | _metric_figures(source, assessment, notes)
        | _map_figures(source, notes)
        | _worker_figures(source, notes)
        | _heatmap_figure(source, notes)
        | _group_figures(source, notes)
        | _coverage_figure(source, assessment, notes)
        | _cost_figures(source, notes)
    )


def _timeline_figure(
    source: FigureSource, findings: Sequence[Mapping[str, Any]], notes: dict[str, str]
) -> dict[str, Spec]:
    step = source.steps["step"]
    if not findings or not len(step):
        return {}
    rows = maps.timeline_rows(findings)
    if len(findings) > maps.MAX_FINDINGS:
        notes["timeline"] = f"The first {maps.MAX_FINDINGS} of {len(findings)} findings are drawn."
    chart = maps.timeline(source.tables, rows, (int(step[0]), int(step[-1])))
    return {"timeline": chart}


def _loss_figure(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    if not source.has("loss"):
        return {}
    view = bins.known_bins(source.overviews["loss"])
    widest = int((view.last_B - view.first_B).max()) + 1
    notes["band"] = f"within {widest:,} steps" if widest > 1 else "in each step"
    points = _curve(source, "loss_mean")
    ranges = bins.range_at(view, [point["step"] for point in points])
    mean = [
        {**point, "low": low, "high": high}
        for point, (low, high) in zip(points, ranges, strict=True)
    ]
    return {"loss": figures.mean_and_range(source.tables, mean, bins.band(view))}


def _metric_figures(
    source: FigureSource, assessment: Assessment, notes: dict[str, str]
) -> dict[str, Spec]:
    per_token = assessment.values.get("loss_per_token")
    nulls = {
        "loss_std": _curve(source, "loss_std_expected"),
        "cosine_mean": series.curve(*expected_cosines(source.run)),
    }
    for note, null in zip(("null", "null-cosine"), nulls.values(), strict=True):
        notes[note] = "known" if _known(null) else ""
    specs = {}
    for name in ("loss_std", "grad_norm_std", "cosine_mean"):
        points = _curve(source, name, observed=name != "loss_std")
        if not _known(points):
            continue
        unit = TOKENS if name == "loss_std" and per_token else ""
        specs[name] = figures.metric(source.tables, points, unit, expected=nulls.get(name, ()))
    return specs


def _map_figures(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    if source.num_workers < 2:
        return specs
    widest = int(max(1, source.steps["interval"].max(initial=1)))
    for name, title in MAP_FIGURES:
        rows = bins.map_rows(source.overviews[name], widest if name in _GRADIENTS else 1)
        apart = any(value for row in rows for value in row["deviation"])
        if rows and (apart or name != "step_seconds"):  # equal losses are copies, and worth seeing
            width = source.num_workers
            chart = maps.worker_map(source.tables, rows, width, title, source.named)
            specs[f"map-{name}"] = chart
    if specs and source.num_workers > bins.MAX_ROWS:
        most = -(-source.num_workers // bins.MAX_ROWS)
        notes["maps"] = f"A row holds up to {most} workers and shows the one farthest apart."
    if specs and any(np.any(v.last_B > v.first_B) for v in source.overviews.values()):
        notes["maps"] += (" " if notes["maps"] else "") + (
            "A column holds several steps and shows the value farthest apart in them."
        )
    return specs


def _worker_figures(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    if len(source.drawn) < source.num_workers:
        notes["workers"] = (
            f"{len(source.drawn)} of {source.num_workers:,} workers are drawn: those that findings "
            "name, those farthest from the middle, and an even choice of the others."
        )
    if source.named:
        named = ranks_in_words(source.named, source.num_workers)
        notes["named"] = f"In red: {named}, named above."
    specs = {}
    for name, unit in WORKER_FIGURES:
        if not source.has(name):
            continue
        view = bins.known_bins(source.overviews[name])
        rows = bins.lines(view, source.drawn)
        lines = figures.worker_lines(source.tables, rows, unit, source.named)
        specs[f"workers-{name}"] = lines
        if source.num_workers > 1:
            rows = bins.apart(view)
            dots = figures.worker_deviations(source.tables, rows, source.named)
            specs[f"apart-{name}"] = dots
    return specs


def _heatmap_figure(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    num_workers = source.run.num_workers
    if not 2 <= num_workers <= MAX_HEATMAP_WORKERS:
        notes["heatmap"] = (
            f"Cosines of single pairs are recorded for 2 to {MAX_HEATMAP_WORKERS} workers."
        )
        return {}
    steps_T, cosines_TWW = source.run.cosines(MAX_FRAMES)
    if not len(steps_T) or not np.isfinite(cosines_TWW).any():
        notes["heatmap"] = "No step of this run has observed gradients."
        return {}
    labels, rows = series.frames(steps_T, cosines_TWW)
    observed = int(source.steps["observed"].sum())
    if len(rows) - 1 < observed:
        notes["frames"] = f"The slider visits {len(rows) - 1} of {observed:,} observed steps."
    return {"heatmap": maps.heatmap(source.tables, num_workers, labels, rows)}


def _group_figures(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    found = bins.last_groups(source.run)
    if found is None or source.num_workers < 2:
        return {}
    shapes = (
        (
            "group-norm",
            bins.norm_rows(found),
            "gradient norm",
            "powers of 2 from the median",
            1.0,
        ),
        ("group-cosine", bins.direction_rows(found), "cosine", maps.UNITS, float(maps.FAR)),
    )
    steps = "step" if found.num_steps == 1 else f"mean of {found.num_steps} observed steps up to"
    notes["groups"] = f"{steps} {found.last_step:,}"
    return {
        name: maps.group_map(source.tables, rows, source.num_workers, title, legend, far=far)
        for name, rows, title, legend, far in shapes
        if rows
    }


def _coverage_figure(
    source: FigureSource, assessment: Assessment, notes: dict[str, str]
) -> dict[str, Spec]:
    rows = _coverage_rows(source.run, notes)
    drawn = assessment.values.get("samples_drawn")
    distinct = assessment.values.get("distinct_samples")
    if not rows:
        notes["coverage"] = "This run recorded no identities of samples to count."
        return {}
    if drawn and distinct is not None:
        notes["coverage-end"] = f"{number(distinct)} different of {number(drawn)} drawn"
    return {"coverage": figures.sample_coverage(source.tables, rows)}


def _coverage_rows(run: Run, notes: dict[str, str]) -> list[Row]:
    """Return rows ``{step, drawn, distinct}``, from roll-ups where the run is long."""
    if not run.is_long and run.num_samples <= MAX_ROWS:
        columns = run.columns(Table.SAMPLES, "step", "samples")
        return series.coverage(columns["step"], list(columns["samples"]))
    counted = run.coverage() or run.count_samples()
    if not len(counted.step_B):
        return []
    if not counted.is_exact:
        notes["coverage-exact"] = "Different ones are estimated, with an error of about 0.5 %."
    moments = zip(counted.step_B, counted.drawn_B, counted.distinct_B, strict=True)
    rows = [{"step": int(s), "drawn": int(n), "distinct": int(d)} for s, n, d in moments]
    return rows[:: max(1, len(rows) // series.MAX_BINS)] + rows[-1:]


def _cost_figures(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    residuals = [row for row in _curve(source, "reduction_residual") if row["value"] is not None]
    if any(row["value"] > 0 for row in residuals):
        specs["residual"] = figures.residual(source.tables, residuals)
    elif residuals:
        notes["residual"] = "The reduction's residual is 0 in every audited step."
    monitor = series.curve(source.steps["step"], 1e3 * source.steps["overhead_seconds"])
    if _known(monitor):
        view = bins.known_bins(source.overviews["step_seconds"])
        step = [
            {"step": r["step"], "value": r["high"] and 1e3 * r["high"]} for r in bins.band(view)
        ]
        specs["time"] = figures.time_per_step(source.tables, step, monitor)
    every_T = np.where(source.steps["interval"] == MISSING_INT, np.nan, source.steps["interval"])
    different = np.unique(every_T[np.isfinite(every_T)])
    if len(different) > 1:
        rows = series.curve(source.steps["step"], every_T)
        specs["interval"] = figures.interval(source.tables, rows)
    elif len(different):
        every = int(different[0])
        notes["interval"] = (
            f"Gradients were measured in every {'step' if every == 1 else f'{every}th step'}."
        )
    return specs


def _curve(source: FigureSource, name: str, *, observed: bool = False) -> list[Row]:
    """Return a column of the steps table, of observed steps only or of all."""
    kept = source.steps["observed"] if observed else slice(None)
    return series.curve(source.steps["step"][kept], source.steps[name][kept])


def _known(rows: Sequence[Row]) -> bool:
    return any(row["value"] is not None for row in rows)
