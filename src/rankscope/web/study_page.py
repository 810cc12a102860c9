"""The page and the figures of a study: its settings side by side, and each of its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankscope.core.signals import Table
from rankscope.diagnose.assessment import assess
from rankscope.record import Run
from rankscope.web import series, study_figures
from rankscope.web.document import png_of, render, write_bytes, write_text
from rankscope.web.maps import heatmap
from rankscope.web.page import RunView, run_view
from rankscope.web.parts import Spec, Tables
from rankscope.web.run_figures import MAX_HEATMAP_WORKERS
from rankscope.web.study_figures import READING_WORDS, SETTING_WORDS, StudyRun
from rankscope.web.study_words import (
    Entry,
    Study,
    alike,
    headline_of,
    open_study,
    why_heading,
    why_they_differ,
)
from rankscope.web.words import METRICS, TITLES


@dataclass(frozen=True, slots=True)
class Panel:
    """A run below the comparison: its entry, its view if the run is there, its figures' prefix."""

    entry: Entry
    view: RunView | None
    key: str


def write_study_page(study_dir: Path, path: Path | None = None) -> Path:
    """Write the page of a study, by default as ``report.html`` in its directory.

    Raises:
        RunError: It is not a study, a run of it cannot be read, or the file cannot be written.
    """
    study = open_study(study_dir)
    tables = Tables()
    pairs = list(study.pairs())
    panels = [
        _panel(tables, f"run{index}-", entry, run) for index, (entry, run) in enumerate(pairs)
    ]
    specs = _comparison(tables, [_compared(entry, run) for entry, run in pairs if run])
    for panel in panels:
        specs |= panel.view.specs if panel.view else {}
    verdict, headline = headline_of(study.entries)
    context = {
        "title": study.name,
        "study": study,
        "severity": verdict,
        "headline": headline,
        "why_heading": why_heading(study.entries),
        "why": why_they_differ(study.entries),
        "panels": panels,
        "assessed": _assessed(study, panels),
        "figure_names": list(specs),
        "rows": _grouped(study.entries),
        "metrics": [(name, *TITLES[name]) for name in METRICS],
        "setting_words": SETTING_WORDS,
        "reading_words": READING_WORDS,
        "colours": _colours(study.entries),
    }
    page = render("study.html", context, specs, tables)
    return write_text(path or study.path / "report.html", page)


def _assessed(study: Study, panels: Sequence[Panel]) -> list[list[Panel]]:
    """Group the panels whose assessments say the same."""
    at = {id(panel.entry): panel for panel in panels}
    return [[at[id(entry)] for entry in entries] for entries in alike(study.entries)]


def _panel(tables: Tables, key: str, entry: Entry, run: Run | None) -> Panel:
    return Panel(entry, run_view(tables, run, assess(run), key) if run else None, key)


def write_study_figures(study_dir: Path, folder: Path | None = None) -> list[Path]:
    """Write the study's figures as PNG files, by default into its ``figures``; return their paths.

    Raises:
        RunError: It is not a study, a run of it cannot be read, or a file cannot be written.
    """
    study = open_study(study_dir)
    compared = [_compared(entry, run) for entry, run in study.pairs() if run]
    if not compared:
        return []
    tables = Tables()
    sheets = {
        "averaged-loss.png": study_figures.averaged_loss_sheet(tables, compared),
        "metrics.png": study_figures.metrics_sheet(tables, compared),
    }
    if any(run.cosines for run in compared):
        sheets["cosine-heatmap.png"] = study_figures.heatmap_sheet(tables, compared)
    folder = folder or study.path / "figures"
    return [write_bytes(folder / name, png_of(sheet, tables)) for name, sheet in sheets.items()]


def _compared(entry: Entry, run: Run) -> StudyRun:
    """Collect what the comparing figures need of one run."""
    steps_T, losses_TW = run.per_worker("loss")
    columns = run.columns(Table.STEPS, "step", "loss_mean", *METRICS)
    step = columns["step"]
    cosines: list[series.Row] = []
    if 2 <= run.num_workers <= MAX_HEATMAP_WORKERS:
        observed_T, cosines_TWW = run.cosines()
        if np.isfinite(cosines_TWW).any():
            cosines = series.frames(observed_T, cosines_TWW)[1][:1]
    return StudyRun(
        setting=entry.setting,
        reading=entry.reading,
        num_workers=run.num_workers,
        means={name: entry.number(name) for name in METRICS},
        loss_mean=series.curve(step, columns["loss_mean"]),
        loss_lines=series.lines(steps_T, losses_TW, series.chosen_workers(losses_TW)),
        metrics={name: series.curve(step, columns[name]) for name in METRICS},
        cosines=cosines,
    )


def _comparison(tables: Tables, runs: Sequence[StudyRun]) -> dict[str, Spec]:
    """Return the figures that compare the runs, by the names that the template uses."""
    if not runs:
        return {}
    specs: dict[str, Spec] = {"dashboard": study_figures.dashboard(tables, runs)}
    losses = study_figures.loss_domain(runs)
    for name in METRICS:
        specs[f"progression-{name}"] = study_figures.progression(tables, runs, name)
        domain = study_figures.metric_domain(runs, name)
        for reading in study_figures.readings(runs):
            members = [run for run in runs if run.reading == reading]
            panel = study_figures.metric_panel(tables, members, name, domain)
            specs[f"{name}-{reading}"] = panel
    for run in runs:
        where = f"{run.reading}-{run.setting}"
        specs[f"losses-{where}"] = study_figures.worker_panel(tables, run, losses)
        if run.cosines:
            heat = heatmap(tables, run.num_workers, [], run.cosines, size=266, legend=False)
            specs[f"cosines-{where}"] = heat
    return specs


def _grouped(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    order = study_figures.in_order([entry.reading for entry in entries], list(READING_WORDS))
    return [(name, [entry for entry in entries if entry.reading == name]) for name in order]


def _colours(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """Return setting, its words and its colour by position: the figures' legend."""
    order = study_figures.in_order([entry.setting for entry in entries], list(SETTING_WORDS))
    return [
        (name.upper(), SETTING_WORDS.get(name, ""), f"var(--setting-{index % 4})")
        for index, name in enumerate(order)
    ]
