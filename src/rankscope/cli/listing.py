"""``rankscope report`` on a directory of runs: which are there, and how each stands."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.output import heading, plain, show
from rankscope.cli.verdict import LOOK, NARROW
from rankscope.core.finding import Severity
from rankscope.diagnose.rules import count
from rankscope.errors import RunError
from rankscope.record.files import is_directory, is_file
from rankscope.web.live.catalog import (
    MAX_DIRECTORIES,
    UNREADABLE,
    Glance,
    glance,
    in_order,
    places,
    stamp,
    unreadable,
)

_LOOK = {**LOOK, UNREADABLE: ("?", "red")}


class Listing:
    """The runs in a directory and below, the worst first.

    Args:
        directory: Where to look.

    Raises:
        RunError: It holds no run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        root = directory.resolve()
        found = places(root)
        if not found.places:
            raise RunError(
                f"{directory} is not a run directory, and holds none: it has no run.json; check "
                "the path"
            )
        self._cut = found.cut
        self._glances: list[Glance] = []
        for place in found.places.values():
            try:
                at = stamp(place, root)
                if at is not None:
                    self._glances.append(glance(place, at))
            except RunError as error:
                self._glances.append(unreadable(place, str(error)))
        self._glances = in_order(self._glances)
        self._now = time.time()

    @property
    def worst(self) -> Severity | None:
        """The worst severity; a run that cannot be read is a warning. None for none."""
        known = [_severity(each) for each in self._glances]
        return max((each for each in known if each is not None), default=None)

    def render(self, console: Console) -> None:
        """Print a line for each run."""
        narrow = console.width < NARROW
        grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in ("Run", "Verdict", *(() if narrow else ("State", "Workers", "Steps"))):
            right = name in ("Workers", "Steps")
            grid.add_column(name, justify="right" if right else "left", overflow="fold")
        grid.add_column("First finding", ratio=1)
        for each in self._glances:
            sign, colour = _LOOK[each.severity]
            numbers = (each.state(self._now), f"{each.num_workers:,}", f"{each.num_steps:,}")
            grid.add_row(
                plain(each.place.name),
                Text(f"{sign} {each.severity}", style=colour),
                *(() if narrow else numbers),
                plain(_headline(each)),
            )
        heading(console, count(len(self._glances), "run"), space=False)
        show(console, grid)
        if self._cut:
            words = f"Only {MAX_DIRECTORIES:,} directories were looked at; name one further down."
            show(console, plain(words, "dim"))
        console.print()
        show(console, plain("Name one of them to see its verdict.", "dim"))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of a directory of runs."""
        return {
            "kind": "runs",
            "path": str(self.directory),
            "severity": None if self.worst is None else str(self.worst),
            "runs": [
                {
                    "path": str(self.directory / each.place.name),
                    "verdict": each.severity,
                    "state": each.state(self._now),
                    "num_workers": each.num_workers,
                    "num_steps": each.num_steps,
                    "headline": each.headline or None,
                    "since_step": each.since_step,
                }
                for each in self._glances
            ],
        }


def is_directory_of_runs(path: Path) -> bool:
    """Return whether a path is a directory that is neither a run's nor a study's."""
    return is_directory(path) and not any(
        is_file(path / name) for name in ("run.json", "study.json")
    )


def _headline(each: Glance) -> str:
    since = "" if each.since_step is None else f", since step {each.since_step:,}"
    return f"{each.headline}{since}"


def _severity(each: Glance) -> Severity | None:
    if each.severity == UNREADABLE:
        return Severity.WARNING
    return None if each.severity in ("healthy", "early") else Severity[each.severity.upper()]
