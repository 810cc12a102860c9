"""Any number of runs over each other: a line of the averaged loss and of each metric for each.

A run has a letter, which its line carries; with more than four runs, dashes tell equal colours
apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING

from rankscope.diagnose.assessment import assess
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.web.compare import curve_of, lettered_lines, rate_scale
from rankscope.web.parts import Spec, Tables
from rankscope.web.words import METRICS, Verdict, titles_of, verdict_of

if TYPE_CHECKING:
    from rankscope.web.series import Row

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
    patterns = {one.letter: _dash(one.letter) for one in shown}
    figures = {}
    for name, by_letter in curves.items():
        if any(by_letter.values()):
            large = name == "loss"
            scale = {"zero": False, "nice": True} if large else rate_scale(by_letter.values())
            height = 320 if large else 190
            figures[f"compare-{name}"] = lettered_lines(tables, by_letter, patterns, scale, height)
    return OverlayView(shown, figures)


def _dash(letter: str) -> tuple[int, ...]:
    return _DASHES[ascii_uppercase.index(letter) // NUM_COLOURS]
