"""The page of one run with its figures; and sheets of these as PNG files."""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.record import Run
from rankscope.report.document import png_of, render, write_bytes, write_text
from rankscope.report.maps import FINDING_ROW
from rankscope.report.parts import Spec, Tables
from rankscope.report.run_figures import OVERVIEWS, FigureSource, read_source, run_figures
from rankscope.verdict.assessment import Assessment, assess
from rankscope.verdict.words import VerdictWords, facts, titles_of, verdict_of

MAX_CHIPS = 64

WIDTH = 1090
"""Pixels of a figure as wide as its sheet; files have twice as many."""

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
_NAMED_ROW = 42
"""Pixels of a finding's row with its name above it."""
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
    return write_text(path or Path(run.path) / "report.html", page)


def run_view(tables: Tables, run: Run, assessment: Assessment, key: str = "") -> RunView:
    """Make the view of a run's page; ``key`` prefixes names of figures and ids of findings."""
    verdict = verdict_of(run, assessment, key)
    named = sorted({rank for finding in verdict.findings for rank in finding["named"]})
    source = read_source(tables, run, named)
    notes: dict[str, str] = defaultdict(str)
    specs = run_figures(source, verdict.findings, assessment, notes)
    num_steps = len(source.steps["step"])
    return RunView(
        key=key,
        verdict=verdict,
        facts=facts(run.info, run.status, _timing(source), run.num_workers, num_steps),
        figures=specs,
        ranks=source.drawn if len(source.drawn) <= MAX_CHIPS else (),
        num_workers=run.num_workers,
        num_steps=num_steps,
        notes=notes,
    )


def _timing(source: FigureSource) -> dict[str, float]:
    """Return the monitor's median time per step, in seconds, if known."""
    spent = source.steps["overhead_seconds"]
    known = spent[np.isfinite(spent)]
    return {"overhead": float(np.median(known))} if known.size else {}


def write_run_pictures(run: Run, assessment: Assessment, folder: Path) -> list[Path]:
    """Write a run's sheets as PNG files: ``overview.png``, ``workers.png`` and ``model.png``.

    Sheets for which the run has no data are left out. The headline stands above each sheet.
    """
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
