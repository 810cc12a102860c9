"""The page of one run with its figures; and sheets of these as PNG files.

Reading and drawing stay bounded at any length of a run and any number of workers.
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.bus.evidence import Table
from rankscope.bus.numbers import number
from rankscope.record import Columns, Overview, Run
from rankscope.record.rollups import MAX_ROWS
from rankscope.report import figures, series
from rankscope.report.document import png_of, render, write_bytes
from rankscope.report.figures import FINDING_ROW
from rankscope.report.parts import Spec, Tables
from rankscope.report.series import Row
from rankscope.stats.arrays import MISSING_INT
from rankscope.verdict.assessment import Assessment, assess
from rankscope.verdict.dispersion import expected_cosines
from rankscope.verdict.words import (
    TOKENS,
    VerdictWords,
    facts,
    ranks_in_words,
    titles_of,
    verdict_of,
)

WORKER_FIGURES = (
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("cosine_rest", "cosine with the others"),
    ("rollout_gap", "gap to the rollouts"),
)
"""Signals that are drawn worker by worker: column, and its name where the pointer is."""
MAP_FIGURES = (*WORKER_FIGURES, ("step_seconds", "seconds"))  # drawn as a map of workers and steps

OVERVIEWS = tuple(name for name, _ in MAP_FIGURES)  # columns of the figures

_GRADIENTS = ("grad_norm", "cosine_rest")  # signals of observed steps only

MAX_HEATMAP_WORKERS = 64
MAX_FRAMES = 400  # steps whose cosines are read, evenly chosen

_STEPS = (
    "step", "observed", "loss_mean", "loss_std", "loss_std_expected", "grad_norm_std",
    "cosine_mean", "reduction_residual", "overhead_seconds", "interval",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FigureSource:
    """The data of the figures of one run.

    ``overviews`` are the workers' signals over the whole run, by name; ``named`` are ranks that
    findings name and that stand out; ``drawn`` have lines of their own.
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

    def compares(self, name: str) -> bool:
        """Return whether workers can differ in a signal: two have one cosine with each other."""
        return self.num_workers > (2 if name == "cosine_rest" else 1)


def read_source(tables: Tables, run: Run, named: Sequence[int]) -> FigureSource:
    """Read the data of a run's figures."""
    overviews = run.overviews(*OVERVIEWS)
    drawn = series.chosen(series.known_bins(overviews["loss"]), named)
    return FigureSource(
        tables=tables,
        run=run,
        steps=run.steps(*_STEPS),
        overviews=overviews,
        named=[rank for rank in named if rank in drawn],
        drawn=drawn,
    )


def _timeline_figure(
    source: FigureSource, findings: Sequence[Mapping[str, Any]], notes: dict[str, str]
) -> dict[str, Spec]:
    step = source.steps["step"]
    if not findings or not len(step):
        return {}
    if len(findings) > figures.MAX_FINDINGS:
        notes["timeline"] = (
            f"The first {figures.MAX_FINDINGS} of {len(findings)} findings are drawn."
        )
    chart = figures.timeline(source.tables, findings, (int(step[0]), int(step[-1])))
    return {"timeline": chart}


def _loss_figure(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    if not source.has("loss"):
        return {}
    view = series.known_bins(source.overviews["loss"])
    widest = int((view.last_B - view.first_B).max()) + 1
    notes["band"] = f"within {widest:,} steps" if widest > 1 else "in each step"
    points = _curve(source, "loss_mean")
    ranges = series.range_at(view, [point["step"] for point in points])
    mean = [
        {**point, "low": low, "high": high}
        for point, (low, high) in zip(points, ranges, strict=True)
    ]
    return {"loss": figures.mean_and_range(source.tables, mean, series.band(view))}


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
    specs: dict[str, Spec] = {}
    for name in ("loss_std", "grad_norm_std", "cosine_mean") if source.num_workers > 1 else ():
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
        rows = series.map_rows(source.overviews[name], widest if name in _GRADIENTS else 1)
        apart = any(value for row in rows for value in row["deviation"])
        shown = apart or name != "step_seconds"  # equal losses are copies, and worth seeing
        if rows and shown and source.compares(name):
            width = source.num_workers
            chart = figures.worker_map(source.tables, rows, width, title, source.named)
            specs[f"map-{name}"] = chart
    if specs and source.num_workers > series.MAX_ROWS:
        most = -(-source.num_workers // series.MAX_ROWS)
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
        view = series.known_bins(source.overviews[name])
        rows = series.lines(view, source.drawn)
        lines = figures.worker_lines(source.tables, rows, unit, source.named)
        specs[f"workers-{name}"] = lines
        if source.compares(name):
            rows = series.deviations(view.mean_BW)
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
    return {"heatmap": figures.heatmap(source.tables, num_workers, labels, rows)}


def _group_figures(source: FigureSource, notes: dict[str, str]) -> dict[str, Spec]:
    found = series.last_groups(source.run)
    if found is None or source.num_workers < 2:
        return {}
    powers = "powers of 2 from the median"
    far = float(figures.FAR)
    shapes = {
        "group-norm": (series.norm_rows(found), "gradient norm", powers, 1.0),
        "group-cosine": (series.direction_rows(found), "cosine", figures.UNITS, far),
    }
    if not source.compares("cosine_rest"):
        del shapes["group-cosine"]
    steps = "step" if found.num_steps == 1 else f"mean of {found.num_steps} observed steps up to"
    notes["groups"] = f"{steps} {found.last_step:,}"
    marks = {mark for rows, *_ in shapes.values() for row in rows for mark in row["mark"]}
    notes["marks"] = " ".join(words for mark, words in _MARKS.items() if mark in marks)
    return {
        name: figures.group_map(source.tables, rows, source.num_workers, title, legend, far)
        for name, (rows, title, legend, far) in shapes.items()
        if rows
    }


_MARKS = {
    series.ABSENT: "No gradient (0): in most of these steps its norm is 0, or undefined beside "
    "those of the worker's other groups.",
    series.UNKNOWN: "Not observed: –, or blank.",
}
"""The meaning of the marks in maps of groups."""


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
    counted = run.coverage()
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
        view = series.known_bins(source.overviews["step_seconds"])
        step = [
            {"step": r["step"], "value": r["high"] and 1e3 * r["high"]} for r in series.band(view)
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


MAX_CHIPS = 64

WIDTH = 1090  # pixels of a figure as wide as its sheet; files have twice as many

SHEETS: Mapping[str, Sequence[Sequence[str]]] = {
    "overview": (("timeline",), ("loss",), ("loss_std", "grad_norm_std", "cosine_mean")),
    "workers": (
        ("map-loss", "map-grad_norm"),
        ("map-cosine_rest", "map-step_seconds"),
        ("map-rollout_gap",),
        ("heatmap", "coverage"),
    ),
    "model": (("group-norm", "group-cosine"),),
}
"""The figures of each file, row by row."""
_GAP = 64
_NAMED_ROW = 42  # pixels of a finding's row with its name above it
OWN_COLOURS = {"scale": {"color": "independent", "strokeDash": "independent"}}


@dataclass(frozen=True, slots=True)
class RunView:
    """The values of a template for one run; figures are placed by name.

    ``figures`` are specifications by name, without the prefix ``key``; ``ranks`` are drawn as lines
    of their own; ``facts`` are pairs of words; ``notes`` complete some captions, by figure.
    """

    key: str
    verdict: VerdictWords
    facts: Sequence[tuple[str, str]]
    figures: Mapping[str, Spec]
    ranks: Sequence[int]
    num_workers: int
    num_steps: int
    notes: Mapping[str, str]

    @property
    def titles(self) -> Mapping[str, tuple[str, str]]:
        """Title and unit of each figure, by name."""
        return titles_of(self.verdict.assessment.values)

    @property
    def specs(self) -> dict[str, Spec]:
        """The figures by their full names."""
        return {f"{self.key}{name}": spec for name, spec in self.figures.items()}


def assessed(run: Run) -> Assessment:
    """Return a run's assessment; one reading serves it and the run's figures."""
    run.overviews(*OVERVIEWS)
    return assess(run)


def write_run_page(run: Run, path: Path | None = None) -> Path:
    """Write the page of a run, by default as ``report.html`` in its directory."""
    tables = Tables()
    view = run_view(tables, run, assessed(run))
    page = render("run.html", {"view": view, "title": view.verdict.title}, view.specs, tables)
    return write_bytes(path or Path(run.path) / "report.html", page.encode())


def run_view(tables: Tables, run: Run, assessment: Assessment, key: str = "") -> RunView:
    """Make the view of a run's page; ``key`` prefixes names of figures and ids of findings."""
    verdict = verdict_of(run, assessment, key)
    source = read_source(tables, run, _standing_out(verdict.findings, run.num_workers))
    notes: dict[str, str] = defaultdict(str)
    specs = (
        _timeline_figure(source, verdict.findings, notes)
        | _loss_figure(source, notes)
        | _metric_figures(source, assessment, notes)
        | _map_figures(source, notes)
        | _worker_figures(source, notes)
        | _heatmap_figure(source, notes)
        | _group_figures(source, notes)
        | _coverage_figure(source, assessment, notes)
        | _cost_figures(source, notes)
    )
    num_steps = len(source.steps["step"])
    return RunView(
        key=key,
        verdict=verdict,
        facts=facts(run.info, run.status, run.num_workers, num_steps),
        figures=specs,
        ranks=source.drawn if len(source.drawn) <= MAX_CHIPS else (),
        num_workers=run.num_workers,
        num_steps=num_steps,
        notes=notes,
    )


def _standing_out(findings: Sequence[Mapping[str, Any]], num_workers: int) -> list[int]:
    """Return the ranks that findings name, the worst first, while they are at most half of all."""
    shown: set[int] = set()
    for finding in findings:
        ranks = shown.union(finding["named"])
        if len(ranks) <= max(1, num_workers // 2):
            shown = ranks
    return sorted(shown)


def write_run_pictures(run: Run, assessment: Assessment, folder: Path) -> list[Path]:
    """Write a run's sheets, those with data, as PNG files with the headline above."""
    tables = Tables()
    view = run_view(tables, run, assessment)
    specs = dict(view.figures)
    if "timeline" in specs:
        specs["timeline"] = _with_titles(specs["timeline"])
    written = []
    for name, rows in SHEETS.items():
        known = [[figure for figure in row if figure in specs] for row in rows]
        if any(known):
            spec = _sheet(view, specs, [row for row in known if row])
            written.append(write_bytes(folder / f"{name}.png", png_of(spec, tables)))
    return written


def _sheet(view: RunView, specs: Mapping[str, Spec], rows: Sequence[Sequence[str]]) -> Spec:
    """Return the figures of a sheet as one specification."""
    titles = view.titles
    panels = [[panel(specs[name], titles[name], name, len(row)) for name in row] for row in rows]
    parameters = [one for row in panels for panel in row for one in panel.pop("params", ())]
    facts = [
        f"{view.verdict.severity.capitalize()} · {view.verdict.title}",
        f"{view.num_workers:,} workers",
        f"{view.num_steps:,} steps",
    ]
    return {
        "params": parameters,
        "vconcat": [{"hconcat": row, "spacing": 40, "resolve": OWN_COLOURS} for row in panels],
        "spacing": 34,
        "resolve": OWN_COLOURS,
        "title": {
            "text": textwrap.wrap(view.verdict.assessment.headline, 92),
            "subtitle": " · ".join(facts),
            "fontSize": 20,
            "subtitleFontSize": 13.5,
            "subtitlePadding": 8,
            "offset": 22,
            "anchor": "start",
        },
    }


def panel(spec: Spec, words_of: tuple[str, str], name: str, in_row: int) -> Spec:
    """Return a figure as part of a sheet: with a width, its title, and parameters of its own."""
    title, unit = words_of
    own = _with_own_names(spec, name)
    own.pop("usermeta", None)
    if own.get("width") == "container":
        own["width"] = (WIDTH - _GAP * (in_row - 1)) // in_row
    words = {"text": title, **({"subtitle": unit} if unit else {})}
    return {**own, "title": {**words, "anchor": "start"}}


def _with_titles(spec: Spec) -> Spec:
    """Return the timeline with each finding's name above its row, which a page shows beside it."""
    own: Spec = json.loads(json.dumps(spec))
    rows = own["layer"][0]
    own["height"] = own["height"] * _NAMED_ROW // FINDING_ROW
    own["layer"].append(
        {
            **{key: rows[key] for key in ("data",) if key in rows},
            "mark": {"type": "text", "style": "ink-label", "align": "left", "dy": -12},
            "encoding": {
                "x": {"value": 0},
                "y": rows["encoding"]["y"],
                "text": {"field": "title", "type": "nominal"},
            },
        }
    )
    return own


def _with_own_names(spec: Spec, name: str) -> Spec:
    """Return a copy whose parameters have names that no other figure of a sheet has."""
    suffix = re.sub(r"\W", "_", name)
    names = _parameters(spec)

    def rename(node: Any, key: str = "") -> Any:
        if isinstance(node, list):
            return [rename(item, key) for item in node]
        if isinstance(node, dict):
            return {field: rename(item, field) for field, item in node.items()}
        if key == "orient" and node == "top":
            return "bottom"  # a legend: above, it would stand over the title
        if not isinstance(node, str):
            return node
        if key in {"name", "param", "views"} and node in names:
            return f"{node}_{suffix}"
        if key in {"filter", "test", "expr"}:
            for old in names:
                node = re.sub(rf"(?<![\w.]){old}(?!\w)", f"{old}_{suffix}", node)
        return node

    own: Spec = rename(json.loads(json.dumps(spec)))
    return own


def _parameters(node: Any) -> set[str]:
    """Return the names of all parameters of a specification, and of the views that have them."""
    if isinstance(node, list):
        return set().union(*(_parameters(item) for item in node))
    if not isinstance(node, dict):
        return set()
    items = [item for item in node.get("params", ()) if isinstance(item, dict)]
    own = {name for item in items for name in (item["name"], *item.get("views", ()))}
    return own.union(*(_parameters(item) for item in node.values()))
