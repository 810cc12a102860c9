"""The page of one run: what it says, with which figures."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.core.signals import Table
from rankscope.diagnose.assessment import Assessment, assess
from rankscope.diagnose.causes import explained_by, ranked
from rankscope.record import Run
from rankscope.web import figures, series, worker_figures
from rankscope.web.document import Spec, render, spec_of, write_text
from rankscope.web.parts import Tables
from rankscope.web.words import facts, finding_view, number, ranks_in_words, tiles, title_of

WORKER_FIGURES = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("cosine_rest", "cosine with the others"),
)
"""Signals that are drawn worker by worker: column, and its name where the pointer is."""

MAX_HEATMAP_WORKERS = 64
MAX_CHIPS = 64


@dataclass(frozen=True, slots=True)
class RunView:
    """All that a template shows of one run; figures are placed by name.

    Attributes:
        key: Prefix of the names of its figures.
        title: The run's name.
        severity: ``healthy``, ``note``, ``warning`` or ``error``.
        assessment: Verdict and statements.
        tiles: The key numbers.
        findings: What was found, worst first.
        facts: Pairs of words about the run.
        figures: Specifications by name, without the prefix.
        ranks: Ranks that are drawn as lines of their own.
        num_workers: W.
        num_steps: T.
        notes: Words that some captions need, by figure.
    """

    key: str
    title: str
    severity: str
    assessment: Assessment
    tiles: Sequence[Mapping[str, str]]
    findings: Sequence[Mapping[str, Any]]
    facts: Sequence[tuple[str, str]]
    figures: Mapping[str, Spec]
    ranks: Sequence[int]
    num_workers: int
    num_steps: int
    notes: Mapping[str, str]

    @property
    def specs(self) -> dict[str, Spec]:
        """The figures by their full names."""
        return {f"{self.key}{name}": spec for name, spec in self.figures.items()}


def write_run_page(run: Run, path: Path | None = None) -> Path:
    """Write the page of a run, by default as ``report.html`` in its directory.

    Raises:
        RunError: The file cannot be written.
    """
    tables = Tables()
    view = run_view(tables, run, assess(run))
    page = render("run.html", {"view": view, "title": view.title}, view.specs, tables)
    return write_text(path or Path(run.path) / "report.html", page)


def run_view(tables: Tables, run: Run, assessment: Assessment, key: str = "") -> RunView:
    """Collect what the page shows of a run."""
    found = ranked(run.findings())
    named = sorted({rank for finding in found for rank in finding.ranks})
    steps = run.columns(Table.STEPS, "step")["step"]
    notes: dict[str, str] = defaultdict(str)
    drawn, specs = _worker_figures(tables, run, named, notes)
    specs |= _loss_figure(tables, run) | _metric_figures(tables, run, notes)
    specs |= _heatmap_figure(tables, run, notes) | _coverage_figure(tables, run, assessment, notes)
    return RunView(
        key=key,
        title=title_of(run.info, run.path),
        severity=str(assessment.severity or "healthy"),
        assessment=assessment,
        tiles=tiles(assessment.values),
        findings=[finding_view(item, run.num_workers, explained_by(item, found)) for item in found],
        facts=facts(run.info, run.status, _timing(run), run.num_workers, len(steps)),
        figures=specs,
        ranks=drawn if len(drawn) <= MAX_CHIPS else (),
        num_workers=run.num_workers,
        num_steps=len(steps),
        notes=notes,
    )


def _loss_figure(tables: Tables, run: Run) -> dict[str, Spec]:
    steps_T, losses_TW = run.per_worker("loss")
    if not np.isfinite(losses_TW).any():
        return {}
    mean = run.columns(Table.STEPS, "step", "loss_mean")
    ranges = series.band(steps_T, losses_TW)
    points = series.curve(mean["step"], mean["loss_mean"])
    at = {int(step): losses_TW[index] for index, step in enumerate(steps_T)}
    for point in points:
        row = at.get(point["step"], np.array([]))
        known = row[np.isfinite(row)]
        point["low"] = float(f"{known.min():.6g}") if known.size else None
        point["high"] = float(f"{known.max():.6g}") if known.size else None
    return {"loss": spec_of(figures.averaged_loss(tables, points, ranges))}


def _metric_figures(tables: Tables, run: Run, notes: dict[str, str]) -> dict[str, Spec]:
    columns = run.columns(
        Table.STEPS, "step", "loss_std", "loss_std_expected", "grad_norm_std", "cosine_mean"
    )
    step = columns["step"]
    curves = {name: series.curve(step, columns[name]) for name in columns if name != "step"}
    expected = curves.pop("loss_std_expected")
    has_null = any(point["value"] is not None for point in expected)
    notes["null"] = "known" if has_null else ""
    specs = {}
    for name, points in curves.items():
        known = any(point["value"] is not None for point in points)
        if not known:
            continue
        null = expected if name == "loss_std" else ()
        unit = "nats per token" if name == "loss_std" else ""
        specs[name] = spec_of(figures.metric(tables, points, unit, expected=null))
    return specs


def _worker_figures(
    tables: Tables, run: Run, named: Sequence[int], notes: dict[str, str]
) -> tuple[list[int], dict[str, Spec]]:
    losses_TW = run.per_worker("loss")[1]
    drawn = series.chosen_workers(losses_TW, named)
    shown = [rank for rank in named if rank in drawn]
    stands_out = shown if len(shown) <= max(1, run.num_workers // 2) else []
    if len(drawn) < run.num_workers:
        notes["workers"] = (
            f"{len(drawn)} of {run.num_workers:,} workers are drawn: those that findings name, "
            "those farthest from the middle, and an even choice of the others."
        )
    if stands_out:
        notes["named"] = f"In red: {ranks_in_words(stands_out, run.num_workers)}, named above."
    specs = {}
    for name, unit in WORKER_FIGURES:
        steps_T, values_TW = run.per_worker(name)
        if not np.isfinite(values_TW).any():
            continue
        rows = series.lines(steps_T, values_TW, drawn)
        lines = worker_figures.worker_lines(tables, rows, unit, stands_out)
        specs[f"workers-{name}"] = spec_of(lines)
        if run.num_workers > 1:
            rows = series.deviations(values_TW)
            dots = worker_figures.worker_deviations(tables, rows, stands_out)
            specs[f"apart-{name}"] = spec_of(dots)
    return drawn, specs


def _heatmap_figure(tables: Tables, run: Run, notes: dict[str, str]) -> dict[str, Spec]:
    if not 2 <= run.num_workers <= MAX_HEATMAP_WORKERS:
        notes["heatmap"] = (
            f"Cosines of single pairs are recorded for 2 to {MAX_HEATMAP_WORKERS} workers."
        )
        return {}
    steps_T, cosines_TWW = run.cosines()
    if not len(steps_T) or not np.isfinite(cosines_TWW).any():
        notes["heatmap"] = "No step of this run has observed gradients."
        return {}
    labels, rows = series.frames(steps_T, cosines_TWW)
    if len(rows) - 1 < len(steps_T):
        notes["frames"] = f"The slider visits {len(rows) - 1} of {len(steps_T):,} steps."
    return {"heatmap": spec_of(figures.heatmap(tables, run.num_workers, labels, rows))}


def _coverage_figure(
    tables: Tables, run: Run, assessment: Assessment, notes: dict[str, str]
) -> dict[str, Spec]:
    columns = run.columns(Table.SAMPLES, "step", "samples")
    rows = series.coverage(columns["step"], list(columns["samples"]))
    drawn = assessment.values.get("samples_drawn")
    distinct = assessment.values.get("distinct_samples")
    if not rows:
        notes["coverage"] = "This run recorded no identities of samples to count."
        return {}
    if drawn and distinct is not None:
        notes["coverage-end"] = f"{number(distinct)} different of {number(drawn)} drawn"
    return {"coverage": spec_of(figures.sample_coverage(tables, rows))}


def _timing(run: Run) -> dict[str, float]:
    """Return the monitor's median time per step and the median step, in seconds, if known."""
    overhead_T = run.columns(Table.STEPS, "overhead_seconds")["overhead_seconds"]
    seconds = run.per_worker("step_seconds")[1]
    parts = {"overhead": overhead_T, "step": seconds.ravel()}
    finite = {name: part[np.isfinite(part)] for name, part in parts.items()}
    return {name: float(np.median(part)) for name, part in finite.items() if part.size}
