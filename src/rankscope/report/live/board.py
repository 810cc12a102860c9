"""The content of each page, made once for all viewers and kept until its run changes."""

import contextlib
import math
import sys
import threading
import time
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.bus.words import printable
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.report.compare import MOST_RUNS
from rankscope.report.live.catalog import (
    MAX_DIRECTORIES,
    Glance,
    ListedPlace,
    Stamp,
    glance,
    in_order,
    places,
    stamp,
    unreadable,
)
from rankscope.report.live.sheets import (
    Sheet,
    compared_content,
    compared_sheet,
    overlaid_content,
    run_content,
    run_sheet,
    runs_sheet,
    words_sheet,
)

REFRESH_SECONDS = 3.0  # seconds between two readings of a changed run, at least
REFRESH_COST = 4.0  # the same as a multiple of the time of the last reading
SCAN_SECONDS = 5.0  # until the directory is looked through again for pages that only offer runs
READ_AHEAD = 4  # runs that are read when the server starts, before any request
MAX_CONTENTS = 24  # pages whose content is kept, the latest used
MAX_VERSIONS = 200  # versions of pages for which it is known which figures they showed

RUNS = "runs"
"""Topic of the page of all runs; others are ``run:ID``, ``compare:ID:ID``, ``overlay:ID:…``."""


@dataclass(frozen=True, slots=True)
class _Kept:
    token: str
    content: Sheet
    made: float
    cost: float


class Board:
    """The pages of a served directory, for several threads; ``refresh_seconds`` 0: no pause."""

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.time,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        self.root = root.resolve()
        self._clock = clock
        self._refresh_seconds = refresh_seconds
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._places: dict[str, ListedPlace] = {}
        self._here: dict[str, ListedPlace] = {}
        self._cut = False
        self._scanned = -math.inf
        self._glances: dict[str, tuple[str, Glance]] = {}
        self._gone: dict[str, float] = {}
        self._failed: dict[str, tuple[str, RunError]] = {}
        self._contents: OrderedDict[str, _Kept] = OrderedDict()
        self._versions: OrderedDict[str, Mapping[str, str]] = OrderedDict()

    def only_run(self) -> str | None:
        """Return the id of the run that the served directory itself is, None if it is not one."""
        found = self._scan()
        return next((place.id for place in found.values() if place.path == self.root), None)

    def read_ahead(self) -> None:
        """Read the runs that stand first in the list."""
        for row in self._rows()[:READ_AHEAD]:
            self.sheet(f"run:{row.place.id}")

    def has(self, topic: str) -> bool:
        """Return whether there is, or was, such a page: a run of any state, or one without runs."""
        kind, _, rest = topic.partition(":")
        if kind == "run":
            return self._find(rest) is not None
        return kind in (RUNS, "compare", "overlay")

    def sheet(self, topic: str) -> Sheet | None:
        """Return a page's content, perhaps some seconds old; None if there is no such page."""
        kind, _, rest = topic.partition(":")
        if kind == RUNS:
            sheet: Sheet | None = self._runs_sheet()
        elif kind == "run":
            sheet = self._run_sheet(rest)
        elif kind == "compare":
            sheet = self._compared_sheet(*rest.partition(":")[::2])
        elif kind == "overlay":
            sheet = self._overlaid_sheet(topic, rest.split(":"))
        else:
            sheet = None
        if sheet is not None:
            with self._lock:
                self._versions[sheet.version] = sheet.figures.digests
                self._versions.move_to_end(sheet.version)
                while len(self._versions) > MAX_VERSIONS:
                    self._versions.popitem(last=False)
        return sheet

    def figures_of(self, version: str) -> Mapping[str, str]:
        """Return the digests of the figures that a version of a page showed; none if forgotten."""
        return self._versions.get(version, {})

    # Pages ------------------------------------------------------------------------------------

    def _runs_sheet(self) -> Sheet:
        rows = self._rows()
        where = self.root.name or str(self.root)
        return runs_sheet(rows, self._clock(), where, MAX_DIRECTORIES if self._cut else None)

    def _rows(self) -> list[Glance]:
        rows = []
        for place in self._scan(0).values():
            try:
                at = self._stamp(place)
                gone = "not there any more"
                rows.append(unreadable(place, gone) if at is None else self._glance(place, at))
            except RunError as error:
                rows.append(unreadable(place, _without(self.root, error)))
        return in_order(rows)

    def _run_sheet(self, run_id: str) -> Sheet | None:
        place = self._find(run_id)
        if place is None:
            return None
        try:
            at = self._stamp(place)
            if at is None:
                return self._gone_sheet(place)
            seen = self._glance(place, at)
            content = self._content(
                f"run:{run_id}", at.token, lambda: run_content(Run.open(place.path))
            )
        except RunError as error:
            return words_sheet(f"{place.name} cannot be read", _without(self.root, error))
        others = [other for other in self._scan().values() if other.id != run_id]
        return run_sheet(seen, content, self._clock(), others, None)

    def _gone_sheet(self, place: ListedPlace) -> Sheet:
        kept = self._contents.get(f"run:{place.id}")
        known = self._glances.get(place.id)
        if kept is None or known is None:
            return words_sheet(
                f"{place.name} is not there any more",
                "Its directory was removed or renamed. Other runs are one click away.",
            )
        return run_sheet(known[1], kept.content, self._clock(), (), self._gone[place.id])

    def _compared_sheet(self, first: str, second: str) -> Sheet:
        runs = list(self._scan().values())
        chosen = [self._find(run_id) for run_id in (first, second)]
        ids = (first, second)
        one, other = chosen
        if one is None or other is None:
            missing = any(run_id and not place for run_id, place in zip(ids, chosen, strict=True))
            words = "One of these runs is not here (any more): choose another." if missing else ""
            return compared_sheet(None, runs, ids, words)
        try:
            stamps = [self._stamp(place) for place in (one, other)]
            if stamps[0] is None or stamps[1] is None:
                raise RunError("one of these runs is not there any more: choose another")
            content = self._content(
                f"compare:{first}:{second}",
                f"{stamps[0].token} {stamps[1].token}",
                lambda: compared_content(Run.open(one.path), Run.open(other.path)),
            )
        except RunError as error:
            return compared_sheet(None, runs, ids, _without(self.root, error))
        return compared_sheet(content, runs, ids)

    def _overlaid_sheet(self, topic: str, run_ids: Sequence[str]) -> Sheet:
        """Return a page of those runs that can be read; others are left out."""
        chosen: dict[str, ListedPlace] = {}
        tokens = []
        for run_id in dict.fromkeys(run_ids):
            place = self._find(run_id)
            with contextlib.suppress(RunError):
                at = None if place is None else self._stamp(place)
                if place is not None and at is not None and len(chosen) < MOST_RUNS:
                    chosen[run_id] = place
                    tokens.append(at.token)
        if not chosen:
            return words_sheet("None of these runs is here", "Choose runs from the list of all.")
        try:
            return self._content(topic, " ".join(tokens), lambda: overlaid_content(_opened(chosen)))
        except RunError as error:
            return words_sheet(
                "These runs cannot be shown over each other", _without(self.root, error)
            )

    # What pages are made from -----------------------------------------------------------------

    def _content(self, topic: str, token: str, make: Callable[[], Sheet]) -> Sheet:
        """Return a page's content, made again if its run has changed; RunError if it never was."""
        with self._making[topic]:
            kept = self._contents.get(topic)
            failed = self._failed.get(topic)
            began = time.monotonic()
            pause = 0.0 if kept is None else max(self._refresh_seconds, REFRESH_COST * kept.cost)
            is_young = self._refresh_seconds > 0 and kept is not None and began - kept.made < pause
            if kept is not None and (kept.token == token or is_young):
                latest = kept
            elif kept is None and failed is not None and failed[0] == token:
                raise failed[1]
            else:
                content = self._made(topic, token, make)
                made = time.monotonic()
                latest = _Kept(token, content, made, made - began)
            with self._lock:
                self._contents[topic] = latest
                self._contents.move_to_end(topic)
                while len(self._contents) > MAX_CONTENTS:
                    self._contents.popitem(last=False)
            return latest.content

    def _made(self, topic: str, token: str, make: Callable[[], Sheet]) -> Sheet:
        """Return content made now, or the content made before while that fails."""
        try:
            with _in_words():
                content = make()
        except RunError as error:
            kept = self._contents.get(topic)
            if kept is None:
                self._failed[topic] = token, error
                raise
            return kept.content
        self._failed.pop(topic, None)
        return content

    def _stamp(self, place: ListedPlace) -> Stamp | None:
        """Return the state of a run's files, None if it is gone; RunError if one is forbidden."""
        at = stamp(place, self.root)
        if at is None:
            self._gone.setdefault(place.id, self._clock())
        else:
            self._gone.pop(place.id, None)
        return at

    def _glance(self, place: ListedPlace, at: Stamp) -> Glance:
        """Return a run's row, made again if its files have changed."""
        known = self._glances.get(place.id)
        if known is None or known[0] != at.token:
            try:
                with _in_words():
                    known = at.token, glance(place, at)
            except RunError as error:
                known = at.token, unreadable(place, _without(self.root, error), at.changed)
            self._glances[place.id] = known
        return known[1]

    def _find(self, run_id: str) -> ListedPlace | None:
        known = self._places.get(run_id)
        return known or self._scan(0).get(run_id)

    def _scan(self, max_age: float = SCAN_SECONDS) -> dict[str, ListedPlace]:
        """Return the runs that are there; those that were there before can still be found."""
        now = time.monotonic()
        if now - self._scanned > max_age:
            found, cut = places(self.root)
            with self._lock:
                self._places |= found
                self._here = found
                self._cut = cut
                self._scanned = now
        return self._here


def _without(root: Path, error: RunError) -> str:
    """Return an error as viewers read it: with paths below the served directory."""
    return str(error).replace(f"{root}/", "")


def _opened(chosen: Mapping[str, ListedPlace]) -> dict[str, Run]:
    """Return those runs that can be opened, by id."""
    runs = {}
    for run_id, place in chosen.items():
        with contextlib.suppress(RunError):
            runs[run_id] = Run.open(place.path)
    return runs


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Turn an unforeseen error into words for the viewer; its trace goes to stderr."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        lines = traceback.format_exc().split("\n")
        print("\n".join(map(printable, lines)), file=sys.stderr)
        raise RunError(
            f"this run cannot be shown at the moment ({type(error).__name__}); what went wrong is "
            "in the terminal of rankscope serve"
        ) from error
