"""Runs over each other: their verdicts, their key numbers, and their curves in one figure each.

A run has a letter, which its curves carry, and dashes: the runs are distinct in grey too. Two
runs are compared more closely: their losses lie over the bands of their workers.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from rankscope.bus.evidence import Table
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.record.tables import step_range
from rankscope.report import series
from rankscope.report.document import render, write_bytes
from rankscope.report.parts import (
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
from rankscope.report.series import Row
from rankscope.verdict.assessment import assess
from rankscope.verdict.words import METRICS, VerdictWords, titles_of, verdict_of

MOST_RUNS = len(ascii_uppercase)
NUM_COLOURS = 4
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2), (12, 4), (1, 4), (4, 1, 1, 1))
"""One for each time that the colours begin again."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs.

    ``letter`` is on its curves, ``run_id`` is its name in addresses (empty without any), ``curves``
    are rows ``{step, value}`` of the averaged loss and of the three metrics, by name.
    """

    letter: str
    run_id: str
    verdict: VerdictWords
    dashes: tuple[int, ...]
    curves: Mapping[str, Sequence[Row]]

    @property
    def colour(self) -> int:
        """Number of its colour."""
        return ascii_uppercase.index(self.letter) % NUM_COLOURS

    @property
    def dash(self) -> str:
        """Its dashes, as SVG writes them."""
        return " ".join(map(str, self.dashes))


@dataclass(frozen=True, slots=True)
class CompareView:
    """The values of a template for runs over each other.

    ``figures`` are specifications by name, without the prefix ``key``: ``compare-loss``, and
    ``compare-`` plus the name of each of the three metrics. ``notes`` are one sentence each.
    """

    sides: Sequence[Side]
    figures: Mapping[str, Spec]
    notes: Sequence[str] = ()
    key: str = ""

    @property
    def titles(self) -> Mapping[str, tuple[str, str]]:
        """Title and unit of each figure, by name."""
        known = [side.verdict.assessment.values.get("loss_per_token") for side in self.sides]
        titles = titles_of({"loss_per_token": all(known)})
        if len(self.sides) == 2:
            return titles
        return {**titles, "compare-loss": ("Averaged loss", titles["compare-loss"][1])}

    @property
    def specs(self) -> dict[str, Spec]:
        """The figures by their full names."""
        return {f"{self.key}{name}": spec for name, spec in self.figures.items()}

    @property
    def numbers(self) -> list[tuple[Mapping[str, str], ...]]:
        """The key numbers: the tiles of all runs, one number after the other."""
        return list(zip(*(side.verdict.tiles for side in self.sides), strict=True))


def compare_view(tables: Tables, run_a: Run, run_b: Run, key: str = "") -> CompareView:
    """Make the view of two runs; their numbers of workers and of steps may differ."""
    runs = (run_a, run_b)
    sides = [_side(at, run, dashes=_DASHES[at]) for at, run in enumerate(runs)]
    behind = [] if not any(side.curves["loss"] for side in sides) else [_bands(tables, runs)]
    return CompareView(sides, _figures(tables, sides, behind), _notes(run_a, run_b), key)


def overlay_view(tables: Tables, runs: Mapping[str, Run]) -> CompareView:
    """Make the view of those of up to 26 runs that can be read; RunError without any."""
    sides: list[Side] = []
    for run_id, run in runs.items():
        with contextlib.suppress(RunError):
            own = _DASHES[len(sides) // NUM_COLOURS]
            sides.append(_side(len(sides), run, run_id, dashes=own))
    if not sides:
        raise RunError("none of these runs can be read: choose others")
    return CompareView(sides, _figures(tables, sides))


def write_compare_page(run_a: Run, run_b: Run, path: Path) -> Path:
    """Write a page of two runs compared."""
    tables = Tables()
    view = compare_view(tables, run_a, run_b)
    title = " and ".join(side.verdict.title for side in view.sides)
    page = render("compare.html", {"view": view, "title": title}, view.specs, tables)
    return write_bytes(path, page.encode())


def _side(at: int, run: Run, run_id: str = "", *, dashes: tuple[int, ...]) -> Side:
    columns = {"loss": "loss_mean", **dict(zip(METRICS, METRICS, strict=True))}
    curves = {name: _curve(run, column) for name, column in columns.items()}
    return Side(ascii_uppercase[at], run_id, verdict_of(run, assess(run)), dashes, curves)


def _curve(run: Run, name: str) -> list[Row]:
    """Return the known values of a column of the steps as rows ``{step, value}``."""
    columns = run.steps("step", name)
    rows = series.curve(columns["step"], columns[name])
    return [row for row in rows if row["value"] is not None]


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


def _figures(tables: Tables, sides: Sequence[Side], behind: Sequence[Spec] = ()) -> dict[str, Spec]:
    """Return the figures for which any run has data; ``behind`` lies behind the losses."""
    large, small = (250, 170) if len(sides) == 2 else (320, 190)
    specs = {}
    for name in ("loss", *METRICS):
        curves = {side.letter: side.curves[name] for side in sides}
        if not any(curves.values()):
            continue
        if name == "loss":
            specs[f"compare-{name}"] = _lines(tables, sides, curves, _LOSSES, large, behind)
        else:
            values = (column(rows, "value") for rows in curves.values())
            scale = {"domain": rate_domain(*values, floor=0.01)}
            specs[f"compare-{name}"] = _lines(tables, sides, curves, scale, small)
    return specs


_LOSSES = {"zero": False, "nice": True}


def _bands(tables: Tables, runs: Sequence[Run]) -> Spec:
    """Return the ranges of the workers' losses, one for each run."""
    encoding = {
        "x": step_axis(),
        "y": channel("low:Q", axis={"title": None}, scale=_LOSSES),
        "y2": {"field": "high"},
        "color": colours("run", list(ascii_uppercase[: len(runs)])),
    }
    ranges = [series.band(series.known_bins(run.overview("loss"))) for run in runs]
    lettered = zip(ascii_uppercase, ranges, strict=False)
    rows = [{**row, "run": letter} for letter, band in lettered for row in band]
    source = tables.add(rows)
    return layer("area", source, encoding, opacity=0.16, strokeWidth=0)


def _lines(
    tables: Tables,
    sides: Sequence[Side],
    curves: Mapping[str, Sequence[Row]],
    scale: Spec,
    height: int,
    behind: Sequence[Spec] = (),
) -> Spec:
    """Return curves over each other by letter, with letters at their ends and a tooltip."""
    lettered = [{**row, "run": letter} for letter, rows in curves.items() for row in rows]
    source = tables.add(lettered)
    place = {
        "x": step_axis(),
        "y": channel("value:Q", axis={"title": None}, scale=scale),
        "color": colours("run", list(curves)),
    }
    ends = [{**rows[-1], "run": letter} for letter, rows in curves.items() if rows]
    # At the right edge, beyond what a zoomed curve is cut to.
    named = {**place, "x": {"value": "width"}, "text": channel("run:N")}
    look = {"align": "left", "fontWeight": 700, "clip": False}
    letters = [
        layer("text", tables.add(ends[first::2]), named, dx=dx, **look)
        for first, dx in enumerate((5, 16))  # two that end together are both read
    ]
    line = {**place, "strokeDash": dashes("run", {side.letter: side.dashes for side in sides})}
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
    return layered(layers, height, [pointed("near", dots, ["step", "run"]), zoomable(dots)])
