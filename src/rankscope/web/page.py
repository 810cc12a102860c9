"""The page of one run: what it says, with which figures."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.diagnose.assessment import Assessment, assess
from rankscope.diagnose.rules import explained_by, ranked
from rankscope.record import Run
from rankscope.web.document import render, write_text
from rankscope.web.parts import Spec, Tables
from rankscope.web.run_figures import MAP_FIGURES, Source, read_source, run_figures
from rankscope.web.titles import titles_of
from rankscope.web.words import anchors, facts, finding_view, tiles, title_of

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
    def titles(self) -> Mapping[str, tuple[str, str]]:
        """Title and unit of each figure, by name."""
        return titles_of(self.assessment.values)

    @property
    def specs(self) -> dict[str, Spec]:
        """The figures by their full names."""
        return {f"{self.key}{name}": spec for name, spec in self.figures.items()}


def assessed(run: Run) -> Assessment:
    """Return a run's assessment, reading together what it and the run's figures need.

    Raises:
        RunError: A file of the run cannot be read.
    """
    run.overviews(*(name for name, _ in MAP_FIGURES))
    return assess(run)


def write_run_page(run: Run, path: Path | None = None) -> Path:
    """Write the page of a run, by default as ``report.html`` in its directory.

    Raises:
        RunError: The file cannot be written.
    """
    tables = Tables()
    view = run_view(tables, run, assessed(run))
    page = render("run.html", {"view": view, "title": view.title}, view.specs, tables)
    return write_text(path or Path(run.path) / "report.html", page)


def run_view(tables: Tables, run: Run, assessment: Assessment, key: str = "") -> RunView:
    """Collect what the page shows of a run.

    Args:
        tables: Keeps the figures' data.
        run: The run.
        assessment: Its assessment.
        key: Prefix of the names of its figures and of the ids of its findings.

    Raises:
        RunError: A file of the run cannot be read.
    """
    found = ranked(run.findings())
    named = sorted({rank for finding in found for rank in finding.ranks})
    shown = [
        finding_view(item, run.num_workers, explained_by(item, found), anchor=anchor)
        for item, anchor in zip(found, anchors(found, key), strict=True)
    ]
    source = read_source(tables, run, named)
    notes: dict[str, str] = defaultdict(str)
    specs = run_figures(source, shown, assessment, notes)
    num_steps = len(source.steps["step"])
    return RunView(
        key=key,
        title=title_of(run.info, run.path),
        severity=str(assessment.severity or "healthy"),
        assessment=assessment,
        tiles=tiles(assessment.values),
        findings=shown,
        facts=facts(run.info, run.status, _timing(source), run.num_workers, num_steps),
        figures=specs,
        ranks=source.drawn if len(source.drawn) <= MAX_CHIPS else (),
        num_workers=run.num_workers,
        num_steps=num_steps,
        notes=notes,
    )


def _timing(source: Source) -> dict[str, float]:
    """Return the monitor's median time per step and the median step, in seconds, if known."""
    seconds = source.overviews["step_seconds"].mean_BW.ravel()
    parts = {"overhead": source.steps["overhead_seconds"], "step": seconds}
    finite = {name: part[np.isfinite(part)] for name, part in parts.items()}
    return {name: float(np.median(part)) for name, part in finite.items() if part.size}
