"""Pages for a browser: content and figures, whole or only the changes; and their assets.

Assets are scripts and style, the same for all pages, which browsers keep for good.
"""

import functools
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import vl_convert
from markupsafe import Markup

from rankscope.bus.words import count
from rankscope.record import Run
from rankscope.report.compare import MOST_RUNS, CompareView, compare_view, overlay_view
from rankscope.report.document import (
    VEGALITE,
    columns,
    configs,
    fill,
    json_markup,
    page_script,
    source,
    style,
    vega_script,
)
from rankscope.report.live.catalog import (
    ORDER,
    UNREADABLE,
    Glance,
    ListedPlace,
    settings_that_differ,
)
from rankscope.report.page import RunView, assessed, run_view
from rankscope.report.parts import Spec, Tables

GZIP_LEVEL = 5
ASSET_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures and their data as pages hold them.

    A table's name comes from its content, so a figure's digest covers its data: its specification
    names the tables.
    """

    specs: Mapping[str, Spec]
    datasets: Mapping[str, Mapping[str, list[Any]]]
    digests: Mapping[str, str]

    @classmethod
    def of(cls, specs: Mapping[str, Spec], tables: Tables) -> "Figures":
        """Return the figures of a view."""
        digests = {name: _digest(json.dumps(spec, sort_keys=True)) for name, spec in specs.items()}
        return cls(specs, columns(tables), digests)

    def since(self, known: Mapping[str, str]) -> dict[str, Any]:
        """Return the figures and tables that a page with these digests lacks."""
        new = {
            name: spec for name, spec in self.specs.items() if self.digests[name] != known.get(name)
        }
        needed = _tables_of(list(new.values()))
        return {
            "names": list(self.specs),
            "specs": new,
            "datasets": {name: self.datasets[name] for name in needed},
        }


NO_FIGURES = Figures({}, {}, {})


@dataclass(frozen=True, slots=True)
class Sheet:
    """A page's content at one moment; other content has another ``version``."""

    title: str
    main: str
    figures: Figures
    version: str

    @classmethod
    def of(cls, title: str, main: str, figures: Figures = NO_FIGURES) -> "Sheet":
        """Return a sheet with the version that its content gives it."""
        parts = [title, main, json.dumps(figures.digests, sort_keys=True)]
        return cls(title, main, figures, _digest("\0".join(parts)))


def run_content(run: Run) -> Sheet:
    """Read a run and make its page's content."""
    tables = Tables()
    view = run_view(tables, run, assessed(run))
    return _content("run.html", view, view.verdict.title, tables)


def run_sheet(
    glance: Glance, content: Sheet, now: float, others: Sequence[ListedPlace], gone: float | None
) -> Sheet:
    """Return a run's page: its state, then its content; ``gone``: when its directory vanished."""
    state = "gone" if gone else glance.state(now)
    main = fill(
        "live_run.html",
        glance=glance,
        state=state,
        content=Markup(content.main),
        others=others,
        gone=gone,
    )
    return Sheet.of(content.title, main, content.figures)


def compared_content(first: Run, second: Run) -> Sheet:
    """Read two runs and make the content of the page that compares them."""
    tables = Tables()
    view = compare_view(tables, first, second)
    title = " and ".join(side.verdict.title for side in view.sides)
    return _content("compare.html", view, title, tables)


def compared_sheet(
    content: Sheet | None, runs: Sequence[ListedPlace], chosen: tuple[str, str], words: str = ""
) -> Sheet:
    """Return the page that compares two runs, or that lets two be chosen."""
    main = fill("live_compare.html", content=content, runs=runs, chosen=chosen, words=words)
    if content is None:
        return Sheet.of("Compare two runs", main)
    return Sheet.of(content.title, main, content.figures)


def overlaid_content(runs: Mapping[str, Run]) -> Sheet:
    """Read runs, by id, and make the content of the page that lays them over each other."""
    tables = Tables()
    view = overlay_view(tables, runs)
    title = f"{count(len(view.sides), 'run')} over each other"
    return _content("overlay.html", view, title, tables, most=MOST_RUNS)


def _content(
    template: str, view: RunView | CompareView, title: str, tables: Tables, **more: Any
) -> Sheet:
    main = fill(template, layout="fragment.html", view=view, title=title, **more)
    return Sheet.of(title, main, Figures.of(view.specs, tables))


def runs_sheet(
    glances: Sequence[Glance], now: float, where: str, cut_at: int | None = None
) -> Sheet:
    """Return the page of all runs; the search ended after ``cut_at`` directories, if not None."""
    rows = [(glance, glance.state(now)) for glance in glances]
    counts = {
        "runs": len(rows),
        "bad": sum(
            glance.severity in ("error", "warning", UNREADABLE)
            or state in ("incomplete", "interrupted")
            for glance, state in rows
        ),
        "running": sum(state in ("running", "starting") for _, state in rows),
        "stalled": sum(state == "stalled" for _, state in rows),
    }
    main = fill(
        "runs.html",
        rows=rows,
        counts=counts,
        where=where,
        cut_at=cut_at,
        settings=settings_that_differ(glances),
        order=ORDER,
    )
    return Sheet.of(where, main)


def words_sheet(title: str, words: str) -> Sheet:
    """Return a page that gives the reason in words why it shows nothing else."""
    return Sheet.of(title, fill("live_words.html", heading=title, words=words))


def page_of(sheet: Sheet, topic: str) -> str:
    """Return a sheet as a whole page that follows a topic of ``Hub``; empty for none."""
    return fill(
        "live.html",
        title=sheet.title,
        main=Markup(sheet.main),
        topic=topic,
        version=sheet.version,
        assets=addresses(),
        figures=json_markup(
            {
                "specs": sheet.figures.specs,
                "datasets": sheet.figures.datasets,
                "configs": configs(),
            }
        ),
    )


def news_of(sheet: Sheet, known: Mapping[str, str]) -> str:
    """Return as JSON the changes for a page that shows the figures with these digests."""
    news = {
        "version": sheet.version,
        "title": sheet.title,
        "main": sheet.main,
        **sheet.figures.since(known),
    }
    return json.dumps(news, separators=(",", ":"), allow_nan=False)


def packed(text: str) -> bytes:
    """Return a text compressed; the same text gives the same bytes."""
    return gzip.compress(text.encode(), GZIP_LEVEL, mtime=0)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=9).hexdigest()


def _tables_of(node: Any) -> set[str]:
    """Return the names of the tables that specifications use."""
    if isinstance(node, list):
        return set().union(*(_tables_of(item) for item in node))
    if not isinstance(node, dict):
        return set()
    data = node.get("data")
    own = {data["name"]} if isinstance(data, dict) and "name" in data else set()
    return own.union(*(_tables_of(item) for item in node.values()))


ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="#4b86c9">'
    '<rect x="1" y="6" width="3" height="9" rx="1"/>'
    '<rect x="5" y="1" width="3" height="14" rx="1"/>'
    '<rect x="9" y="9" width="3" height="6" rx="1" opacity=".55"/>'
    '<rect x="13" y="3" width="3" height="12" rx="1"/></svg>'
)


class Asset(NamedTuple):
    """One file: its type, its content compressed."""

    kind: str
    content: bytes


def addresses() -> dict[str, str]:
    """Return the address of each asset by its name; it changes when the content does."""
    return {name: f"/assets/{tag}/{name}" for name, tag in _tags().items()}


@functools.lru_cache(maxsize=16)
def asset(tag: str, name: str) -> Asset | None:
    """Return an asset, None if there is none with this name and tag."""
    if _tags().get(name) != tag:
        return None
    kind, text = _SOURCES[name]
    return Asset(kind, gzip.compress(text().encode(), ASSET_LEVEL, mtime=0))


_SOURCES: dict[str, tuple[str, Callable[[], str]]] = {
    "vega.js": ("text/javascript", vega_script),
    "page.js": ("text/javascript", page_script),
    "live.js": (
        "text/javascript",
        lambda: source("morph.js") + source("live.js") + source("runs.js"),
    ),
    "style.css": ("text/css", lambda: style() + source("live.css")),
    "icon.svg": ("image/svg+xml", lambda: ICON),
}


@functools.cache
def _tags() -> dict[str, str]:
    """Return a part of each asset's address that its content decides.

    The large script is known by the versions that make it: making it takes seconds, and the first
    page does not wait for that.
    """
    large = f"{getattr(vl_convert, '__version__', '')} {VEGALITE}"
    texts = {name: large if name == "vega.js" else text() for name, (_, text) in _SOURCES.items()}
    return {
        name: hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        for name, text in texts.items()
    }
