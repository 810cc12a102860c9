"""Any number of runs over each other: a line of the averaged loss and of each metric for each.

A run has a letter, which its line carries; with more than four runs, dashes tell equal colours
apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from rankscope.diagnose.assessment import assess
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.web.compare import curve_of
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

MOST_RUNS = len(ascii_uppercase)
NUM_COLOURS = 4
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2), (12, 4), (1, 4), (4, 1, 1, 1))
"""One for each time that the colours begin again."""


@dataclass(frozen=True, slots=True)
class Overlaid:
    """One of the runs.

    Attributes:
        letter: Its line carries it.
        run_id: Names it in addresses.
        verdict: What is said of it.
    """

    letter: str
    run_id: str
    verdict: Verdict

    @property
    def colour(self) -> int:
        """Number of its colour."""
        return ascii_uppercase.index(self.letter) % NUM_COLOURS

    @property
    def dash(self) -> str:
        """Its dashes, as SVG writes them."""
        return " ".join(map(str, _dash(self.letter)))


@dataclass(frozen=True, slots=True)
class OverlayView:
    """All that a template shows of runs over each other.

    Attributes:
        runs: The runs.
        figures: Specifications by name, as of two runs compared.
        key: Prefix of the names of its figures: none.
    """

    runs: Sequence[Overlaid]
    figures: Mapping[str, Spec]
    key: str = ""

    @property
    def titles(self) -> Mapping[str, tuple[str, str]]:
        """Title and unit of each figure, by name."""
        known = [run.verdict.assessment.values.get("loss_per_token") for run in self.runs]
        titles = titles_of({"loss_per_token": all(known)})
        return {**titles, "compare-loss": ("Averaged loss", titles["compare-loss"][1])}


def overlay_view(tables: Tables, runs: Mapping[str, Run]) -> OverlayView:
    """Collect what a page shows of runs over each other; one that cannot be read is left out.

    Args:
        tables: Keeps the figures' data.
        runs: By id, 26 at most.

    Raises:
        RunError: None of them can be read.
    """
    shown: list[Overlaid] = []
    curves: dict[str, dict[str, Sequence[Row]]] = {name: {} for name in ("loss", *METRICS)}
    for run_id, run in runs.items():
        letter = ascii_uppercase[len(shown)]
        try:
            own = {name: curve_of(run, "loss_mean" if name == "loss" else name) for name in curves}
            shown.append(Overlaid(letter, run_id, verdict_of(run, assess(run))))
        except RunError:
            continue
        for name, rows in own.items():
            curves[name][letter] = rows
    if not shown:
        raise RunError("none of these runs can be read: choose others")
    figures = {
        f"compare-{name}": _lines(tables, by_letter, large=name == "loss")
        for name, by_letter in curves.items()
        if any(by_letter.values())
    }
    return OverlayView(shown, figures)


def _lines(tables: Tables, curves: Mapping[str, Sequence[Row]], *, large: bool) -> Spec:
    """Return curves by letter, rows ``{step, value}``, over each other."""
    scale: Spec = {"zero": False, "nice": True}
    if not large:
        domain = rate_domain(*(column(rows, "value") for rows in curves.values()), floor=0.01)
        scale = {"domain": domain}
    lettered = [{**row, "run": letter} for letter, rows in curves.items() for row in rows]
    source = tables.add(lettered)
    place = {
        "x": step_axis(),
        "y": channel("value:Q", axis={"title": None}, scale=scale),
        "color": colours("run", list(curves)),
    }
    ends = tables.add([{**rows[-1], "run": letter} for letter, rows in curves.items() if rows])
    line = {**place, "strokeDash": dashes("run", {letter: _dash(letter) for letter in curves})}
    shown = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    tips = [channel("run:N", title="run"), step_tip(), tip("value", "value")]
    dots = layer(
        "point", source, {**place, "opacity": shown, "tooltip": tips}, filled=True, size=34
    )
    named = {**place, "text": channel("run:N")}
    layers = [
        layer("line", source, line, strokeWidth=1.7, strokeJoin="round"),
        layer("text", ends, named, align="left", dx=5, fontWeight=700),
        dots,
    ]
    parameters = [pointed("near", dots, ["step", "run"]), zoomable(dots)]
    figure = layered(layers, 320 if large else 190, parameters)
    return {**figure, "padding": {"left": 2, "right": 20, "top": 6, "bottom": 2}}  # for letters


def _dash(letter: str) -> tuple[int, ...]:
    return _DASHES[ascii_uppercase.index(letter) // NUM_COLOURS]
