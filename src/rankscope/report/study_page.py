"""The page and the figures of a study: its settings side by side, and each of its runs."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rankscope.bus.evidence import Table
from rankscope.record import Run
from rankscope.report import series
from rankscope.report.document import png_of, render, write_bytes
from rankscope.report.figures import heatmap
from rankscope.report.page import MAX_HEATMAP_WORKERS, RunView, run_view
from rankscope.report.parts import (
    DOT,
    Spec,
    Tables,
    channel,
    colours,
    column,
    dashes,
    headed,
    layer,
    layered,
    rate_domain,
    sized,
    step_axis,
    step_tip,
    tip,
    titled,
)
from rankscope.report.series import Row
from rankscope.report.study_words import (
    MEANS,
    RATIO,
    SETTING_WORDS,
    Entry,
    alike,
    headline_of,
    open_study,
    why_heading,
    why_they_differ,
)
from rankscope.verdict.assessment import assess
from rankscope.verdict.words import METRICS, TITLES

SHORT_WORDS = {"s1-1": "equal seeds", "s1-2": "rank 0 differs", "s1-3": "all differ"}
READING_WORDS = {
    "sharded": "Sharded: each worker reads its own shard",
    "replicated": "Replicated: every worker reads the whole data set",
}


@dataclass(frozen=True, slots=True)
class StudyRun:
    """The data of one run of a study for its figures.

    Setting and reading are such as ``s1-1`` and ``sharded``. ``means`` over steps of the three
    metrics are None where undefined. Rows are ``{step, value}``, of ``loss_lines``
    ``{step, rank, value}``, of ``cosines`` ``{frame, cosines}``, empty when there are none.
    """

    setting: str
    reading: str
    num_workers: int
    means: dict[str, float | None]
    loss_mean: list[Row]
    loss_lines: list[Row]
    metrics: dict[str, list[Row]]
    cosines: list[Row] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The setting as it is shown: ``S1-1``."""
        return self.setting.upper()


def in_order(values: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the different values, known ones first and in their usual order."""
    different = list(dict.fromkeys(values))
    rest = [value for value in different if value not in known]
    return [value for value in known if value in different] + rest


def setting_labels(runs: Sequence[StudyRun]) -> list[str]:
    """Return the settings of a study as they are shown, in order."""
    return [name.upper() for name in in_order([run.setting for run in runs], SETTING_WORDS)]


def loss_domain(runs: Sequence[StudyRun]) -> list[float]:
    """Return one vertical domain for the losses of all workers of all runs."""
    known = [v for run in runs for v in column(run.loss_lines, "value") if v is not None]
    return [min(known, default=0.0), max(known, default=1.0)]


def dashboard(tables: Tables, runs: Sequence[StudyRun]) -> Spec:
    """Return the averaged losses alone, all runs over each other, as on a dashboard."""
    rows = [
        {"step": p["step"], "value": p["value"], "setting": run.label, "reading": run.reading}
        for run in runs
        for p in run.loss_mean
    ]
    shown = {"title": None, "orient": "top", "symbolType": "stroke"}
    dash = dashes("reading", dict(zip(READING_WORDS, ((1, 0), (4, 3)), strict=True)))
    encoding = {
        "x": step_axis(),
        "y": channel("value:Q", axis={"title": None}, scale={"zero": False}),
        "color": colours("setting", setting_labels(runs), "stroke"),
        "strokeDash": {**dash, "legend": shown},
    }
    return layered([layer("line", tables.add(rows), encoding, style="setting")], 170)


def worker_panel(tables: Tables, run: StudyRun, domain: Sequence[float]) -> Spec:
    """Return the losses of the workers of one run with their average in front."""
    scale = {"domain": list(domain), "nice": True, "zero": False}
    place = {"x": step_axis(ticks=4), "y": channel("value:Q", axis={"title": None}, scale=scale)}
    tips = [channel("rank:O", title="rank"), step_tip(), tip("value", "loss")]
    each = {**place, "detail": channel("rank:N"), "tooltip": tips}
    layers = [
        layer("line", tables.add(run.loss_lines), each, style="worker"),
        layer("line", tables.add(run.loss_mean), place, style="mean"),
    ]
    return layered(layers, 180)


def metric_panel(
    tables: Tables, runs: Sequence[StudyRun], name: str, domain: Sequence[float]
) -> Spec:
    """Return one metric over time, one line per setting; the runs are those of one reading."""
    rows = [
        {"step": point["step"], "value": point["value"], "setting": run.label}
        for run in runs
        for point in run.metrics[name]
    ]
    encoding = {
        "x": step_axis(ticks=4),
        "y": channel("value:Q", axis={"title": None}, scale={"domain": list(domain)}),
        "color": colours("setting", setting_labels(runs)),
        "tooltip": [channel("setting:N"), step_tip(), tip("value", "value")],
    }
    return layered([layer("line", tables.add(rows), encoding, style="setting")], 170)


def progression(tables: Tables, runs: Sequence[StudyRun], name: str) -> Spec:
    """Return a metric's mean by setting, one connected line per reading, with its values."""
    labels = {
        name: f"{name.upper()}|{SHORT_WORDS.get(name, '')}"
        for name in in_order([run.setting for run in runs], SETTING_WORDS)
    }
    tops: dict[str, StudyRun] = {}
    for run in sorted(runs, key=lambda run: -(run.means[name] or 0.0)):
        tops.setdefault(run.setting, run)
    rows = [
        {
            "setting": labels[run.setting],
            "reading": run.reading,
            "value": run.means[name],
            "above": run is tops[run.setting],
        }
        for run in runs
    ]
    low, high = rate_domain(column(rows, "value"), floor=0.01)
    room = 0.16 * (high - low)
    scale = {"domain": [low - room, high + room / 2], "nice": False}
    axis = {"title": None, "labelAngle": 0, "labelExpr": "split(datum.label, '|')"}
    kinds = in_order([run.reading for run in runs], READING_WORDS)
    source = tables.add(rows)
    place = {
        "x": channel("setting:N", sort=list(labels.values()), axis=axis),
        "y": channel("value:Q", axis={"title": None}, scale=scale),
    }
    coloured = {**place, "color": colours("reading", kinds, "circle")}
    words = channel("value:Q", format=".3f")
    tips = [channel("reading:N"), channel("setting:N"), tip("value", "value")]
    layers = [
        layer("line", source, coloured, strokeWidth=2),
        layer("point", source, {**coloured, "tooltip": tips}, size=70, **DOT),
    ]
    for above, dy in ((True, -14), (False, 16)):  # apart, where readings nearly agree
        own = {"filter": {"field": "above", "equal": above}}
        layers.append(layer("text", source, {**place, "text": words}, own, style="halo", dy=dy))
        layers.append(layer("text", source, {**coloured, "text": words}, own, dy=dy, fontSize=11))
    return layered(layers, 220)


def averaged_loss_sheet(tables: Tables, runs: Sequence[StudyRun]) -> Spec:
    """Return the figure "smooth averaged loss over disagreeing workers", 1,200 pixels wide."""
    domain = loss_domain(runs)
    top = sized(dashboard(tables, runs), 1090)
    rows = [titled(top, "What a dashboard shows", "the loss averaged over the workers, all runs")]
    panels = [(run, sized(worker_panel(tables, run, domain), 339)) for run in runs]
    return headed(
        {"vconcat": [*rows, *_by_reading(panels)], "spacing": 30},
        "A smooth average over workers that disagree",
        "Thin lines: the local loss of each worker. Thick line: their average. Nats per token.",
    )


def heatmap_sheet(tables: Tables, runs: Sequence[StudyRun]) -> Spec:
    """Return the mean cosines of all pairs of workers, one heatmap per run."""
    panels = [
        (run, heatmap(tables, run.num_workers, [], run.cosines, size=310))
        for run in runs
        if run.cosines
    ]
    return headed(
        {"vconcat": _by_reading(panels), "spacing": 30},
        "Do the workers' gradients point the same way?",
        "Cosine between the local gradients of each pair of workers, before the reduction, "
        "mean over the run.",
    )


def metrics_sheet(tables: Tables, runs: Sequence[StudyRun]) -> Spec:
    """Return the mean of the three metrics by setting and reading."""
    panels = [
        titled(sized(progression(tables, runs, name), 310, 280), *TITLES[name]) for name in METRICS
    ]
    return headed(
        {"hconcat": panels, "spacing": 62, "bounds": "flush"},
        "The three metrics by setting and by how the data is read",
        "Mean over the run. Workers with shards of their own see different samples whatever "
        "the seeds; replicated workers with equal seeds see equal batches.",
    )


def _by_reading(panels: Sequence[tuple[StudyRun, Spec]]) -> list[Spec]:
    """Return a row of titled panels for each reading."""
    rows = []
    for reading in in_order([run.reading for run, _ in panels], READING_WORDS):
        name, _, words = READING_WORDS.get(reading, reading).partition(": ")
        row = [
            titled(panel, run.label, SETTING_WORDS.get(run.setting, ""))
            for run, panel in panels
            if run.reading == reading
        ]
        rows.append(titled({"hconcat": row}, name, words))
    return rows


@dataclass(frozen=True, slots=True)
class Panel:
    """A run below the comparison: its entry, its view if the run is there, its figures' prefix."""

    entry: Entry
    view: RunView | None
    key: str


def write_study_page(study_dir: Path, path: Path | None = None) -> Path:
    """Write the page of a study, by default as ``report.html`` in its directory."""
    study = open_study(study_dir)
    tables = Tables()
    pairs = list(study.pairs())
    panels = []
    for index, (entry, run) in enumerate(pairs):
        key = f"run{index}-"
        panels.append(Panel(entry, run_view(tables, run, assess(run), key) if run else None, key))
    panel_of = {id(panel.entry): panel for panel in panels}
    order = in_order([entry.setting for entry in study.entries], SETTING_WORDS)
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
        "assessed": [[panel_of[id(entry)] for entry in same] for same in alike(study.entries)],
        "figure_names": list(specs),
        "rows": _grouped(study.entries),
        "metrics": [(name, *TITLES[name]) for name in METRICS],
        "means": f"{MEANS} {RATIO}",
        "setting_words": SETTING_WORDS,
        "reading_words": READING_WORDS,
        "colours": [
            (name.upper(), SETTING_WORDS.get(name, ""), f"var(--setting-{index % 4})")
            for index, name in enumerate(order)
        ],
    }
    page = render("study.html", context, specs, tables)
    return write_bytes(path or study.path / "report.html", page.encode())


def write_study_figures(study_dir: Path, folder: Path | None = None) -> list[Path]:
    """Write the study's PNG files, by default into its ``figures``; return their paths."""
    study = open_study(study_dir)
    compared = [_compared(entry, run) for entry, run in study.pairs() if run]
    if not compared:
        return []
    tables = Tables()
    sheets = {
        "averaged-loss.png": averaged_loss_sheet(tables, compared),
        "metrics.png": metrics_sheet(tables, compared),
    }
    if any(run.cosines for run in compared):
        sheets["cosine-heatmap.png"] = heatmap_sheet(tables, compared)
    folder = folder or study.path / "figures"
    return [write_bytes(folder / name, png_of(sheet, tables)) for name, sheet in sheets.items()]


def _compared(entry: Entry, run: Run) -> StudyRun:
    """Collect the data of one run for the comparing figures."""
    losses = series.known_bins(run.overview("loss"))
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
        loss_lines=series.lines(losses, series.chosen(losses)),
        metrics={name: series.curve(step, columns[name]) for name in METRICS},
        cosines=cosines,
    )


def _comparison(tables: Tables, runs: Sequence[StudyRun]) -> dict[str, Spec]:
    """Return the figures that compare the runs, by the names that the template uses."""
    if not runs:
        return {}
    specs: dict[str, Spec] = {"dashboard": dashboard(tables, runs)}
    losses = loss_domain(runs)
    for name in METRICS:
        specs[f"progression-{name}"] = progression(tables, runs, name)
        domain = rate_domain(*(column(run.metrics[name], "value") for run in runs), floor=0.01)
        for reading in in_order([run.reading for run in runs], READING_WORDS):
            members = [run for run in runs if run.reading == reading]
            panel = metric_panel(tables, members, name, domain)
            specs[f"{name}-{reading}"] = panel
    for run in runs:
        where = f"{run.reading}-{run.setting}"
        specs[f"losses-{where}"] = worker_panel(tables, run, losses)
        if run.cosines:
            heat = heatmap(tables, run.num_workers, [], run.cosines, size=266, legend=False)
            specs[f"cosines-{where}"] = heat
    return specs


def _grouped(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    order = in_order([entry.reading for entry in entries], READING_WORDS)
    return [(name, [entry for entry in entries if entry.reading == name]) for name in order]
