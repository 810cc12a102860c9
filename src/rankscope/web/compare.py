"""Two runs side by side: their verdicts, key numbers, and curves over each other.

A and B differ in colour and in their dashes, and each curve carries its letter: they can be told
apart in grey too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.core.signals import Table
from rankscope.diagnose.assessment import assess
from rankscope.record import Run
from rankscope.record.tables import step_range
from rankscope.web import bins, series
from rankscope.web.document import render, write_text
from rankscope.web.parts import (
    Spec,
    Tables,
    channel,
    colours,
    column,
    dashes,
    layer,
    layered,
    pointed,
    rate_domain,
    step_axis,
    step_tip,
    tip,
    zoomable,
)
from rankscope.web.series import Row
from rankscope.web.words import METRICS, Verdict, titles_of, verdict_of

LETTERS = ("A", "B")
_DASHES = dict(zip(LETTERS, ((1, 0), (6, 3)), strict=True))


@dataclass(frozen=True, slots=True)
class Side:
    """One of two compared runs.

    Attributes:
        letter: ``A`` or ``B``: its curves carry it.
        verdict: What is said of the run.
    """

    letter: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class CompareView:
    """All that a template shows of two runs compared (macro ``comparison`` of ``_parts.html``).

    Attributes:
        key: Prefix of the names of its figures.
        sides: A and B.
        figures: Specifications by name, without the prefix: ``compare-loss`` and
            ``compare-`` plus the name of each of the three metrics.
        notes: What the reader should know of the curves, one sentence each.
    """

    key: str
    sides: tuple[Side, Side]
    figures: Mapping[str, Spec]
    notes: Sequence[str]

    @property
    def titles(self) -> Mapping[str, tuple[str, str]]:
        """Title and unit of each figure, by name."""
        known = [side.verdict.assessment.values.get("loss_per_token") for side in self.sides]
        return titles_of({"loss_per_token": all(known)})

    @property
    def specs(self) -> dict[str, Spec]:
        """The figures by their full names."""
        return {f"{self.key}{name}": spec for name, spec in self.figures.items()}

    @property
    def numbers(self) -> list[tuple[str, Mapping[str, str], Mapping[str, str]]]:
        """The key numbers of both: the label, and the tiles of A and of B."""
        pairs = zip(*(side.verdict.tiles for side in self.sides), strict=True)
        return [(one["label"], one, other) for one, other in pairs]


def compare_view(tables: Tables, run_a: Run, run_b: Run, key: str = "") -> CompareView:
    """Collect what a page shows of two runs compared.

    Args:
        tables: Keeps the figures' data.
        run_a: A run.
        run_b: Another one; its number of workers and of steps may differ.
        key: Prefix of the names of the figures.

    Raises:
        RunError: A file of a run cannot be read.
    """
    runs = (run_a, run_b)
    specs: dict[str, Spec] = {}
    losses = [_loss(run) for run in runs]
    if any(mean for mean, _ in losses):
        specs["compare-loss"] = _compared_losses(tables, losses)
    for name in METRICS:
        curves = [curve_of(run, name) for run in runs]
        if any(value is not None for rows in curves for value in column(rows, "value")):
            specs[f"compare-{name}"] = _compared_curves(tables, curves)
    side_a, side_b = (
        Side(letter, verdict_of(run, assess(run)))
        for run, letter in zip(runs, LETTERS, strict=True)
    )
    return CompareView(key, (side_a, side_b), specs, _notes(run_a, run_b))


def write_compare_page(run_a: Run, run_b: Run, path: Path) -> Path:
    """Write a page of two runs compared.

    Raises:
        RunError: A file of a run cannot be read, or the page cannot be written.
    """
    tables = Tables()
    view = compare_view(tables, run_a, run_b)
    title = " and ".join(side.verdict.title for side in view.sides)
    page = render("compare.html", {"view": view, "title": title}, view.specs, tables)
    return write_text(path, page)


def _notes(run_a: Run, run_b: Run) -> list[str]:
    notes = []
    if run_a.num_workers != run_b.num_workers:
        notes.append(
            f"A has {run_a.num_workers:,} workers and B {run_b.num_workers:,}: a spread over more "
            "workers reaches farther, so compare the dispersions rather than the bands."
        )
    ends = [step_range(run.path, Table.STEPS) for run in (run_a, run_b)]
    if all(ends) and ends[0] != ends[1]:
        spans = [f"steps {found[0]:,} to {found[1]:,}" for found in ends if found]
        notes.append(f"A has {spans[0]}, B {spans[1]}; equal steps are drawn above each other.")
    return notes


def _loss(run: Run) -> tuple[list[Row], list[Row]]:
    return curve_of(run, "loss_mean"), bins.band(bins.known_bins(run.overview("loss")))


def curve_of(run: Run, name: str) -> list[Row]:
    """Return a column of the steps as rows ``{step, value}``, those that are known."""
    columns = run.steps("step", name)
    rows = series.curve(columns["step"], columns[name])
    return [row for row in rows if row["value"] is not None]


def _compared_losses(tables: Tables, losses: Sequence[tuple[Sequence[Row], Sequence[Row]]]) -> Spec:
    """Return the averaged losses of two runs, each over the band of its workers.

    Args:
        tables: Keeps the data.
        losses: For A and B: rows ``{step, value}`` of the mean and ``{step, low, high}`` of the
            band.
    """
    scale = {"zero": False, "nice": True}
    encoding = {
        "x": step_axis(),
        "y": channel("low:Q", axis={"title": None}, scale=scale),
        "y2": {"field": "high"},
        "color": colours("run", LETTERS),
    }
    source = tables.add(_lettered(_by_letter([ranges for _, ranges in losses])))
    bands = layer("area", source, encoding, opacity=0.16, strokeWidth=0)
    means = _by_letter([mean for mean, _ in losses])
    return lettered_lines(tables, means, _DASHES, scale, 250, bands)


def _compared_curves(tables: Tables, curves: Sequence[Sequence[Row]]) -> Spec:
    """Return one curve of two runs, rows ``{step, value}``, over each other."""
    return lettered_lines(tables, _by_letter(curves), _DASHES, rate_scale(curves), 170)


def rate_scale(curves: Iterable[Sequence[Row]]) -> Spec:
    """Return the scale of a metric that all curves share."""
    return {"domain": rate_domain(*(column(rows, "value") for rows in curves), floor=0.01)}


def lettered_lines(
    tables: Tables,
    curves: Mapping[str, Sequence[Row]],
    patterns: Mapping[str, Sequence[int]],
    scale: Spec,
    height: int,
    *behind: Spec,
) -> Spec:
    """Return curves over each other, their letters at their ends, and what the pointer tells.

    Args:
        tables: Keeps the data.
        curves: Rows ``{step, value}`` by letter.
        patterns: Dashes by letter.
        scale: Of the values.
        height: Of the figure, in pixels.
        behind: Layers that lie behind the curves.
    """
    source = tables.add(_lettered(curves))
    place = {
        "x": step_axis(),
        "y": channel("value:Q", axis={"title": None}, scale=scale),
        "color": colours("run", list(curves)),
    }
    ends = [{**rows[-1], "run": letter} for letter, rows in curves.items() if rows]
    named = {**place, "text": channel("run:N")}
    letters = [
        layer("text", tables.add(ends[first::2]), named, align="left", dx=dx, fontWeight=700)
        for first, dx in enumerate((5, 16))  # two that end together are both read
    ]
    line = {**place, "strokeDash": dashes("run", patterns)}
    shown = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    tips = [channel("run:N", title="run"), step_tip(), tip("value", "value")]
    dots = layer(
        "point", source, {**place, "opacity": shown, "tooltip": tips}, filled=True, size=34
    )
    layers = [
        *behind,
        layer("line", source, line, strokeWidth=1.9, strokeJoin="round"),
        *letters,
        dots,
    ]
    figure = layered(layers, height, [pointed("near", dots, ["step", "run"]), zoomable(dots)])
    return {**figure, "padding": {"left": 2, "right": 28, "top": 6, "bottom": 2}}  # for letters


def _by_letter(curves: Sequence[Sequence[Row]]) -> dict[str, Sequence[Row]]:
    return dict(zip(LETTERS, curves, strict=True))


def _lettered(curves: Mapping[str, Sequence[Row]]) -> list[Row]:
    return [{**row, "run": letter} for letter, rows in curves.items() for row in rows]
