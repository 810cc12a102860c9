r"""One HTML file that needs nothing else: template, style, scripts, figures and their data.

The file carries a content security policy that lets a browser run these scripts only, by their
digests, and open no connection at all. Names from a run pass through Jinja's escaping, or through
JSON in which ``<`` is written ``\u003c``; so they can never become markup.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from rankscope.bus.numbers import number, whole
from rankscope.errors import RunError
from rankscope.files import ELSEWHERE, cache_root, read_own, staged
from rankscope.report.parts import Spec, Tables
from rankscope.verdict import words
from rankscope.verdict.rules import cause_pages

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
"""Fonts that machines already have; nothing is loaded."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one mode, by role.

    Figures name roles ("mean", "worker", "expected"), never colours; the configuration gives the
    roles their colours. So one definition of a figure serves the light page, the dark page and PNG
    files. ``ink`` is the averaged curve's, too, the most prominent mark; ``soft`` is for labels and
    secondary text, ``focus`` for the worker under the pointer, ``named`` for those that a finding
    names, ``expected`` for what sampling alone would give. ``settings`` also colour categories in
    general; ``diverging`` goes from -1 over 0 to 1; ``severities`` are those of a note, a warning,
    an error.
    """

    surface: str
    ink: str
    soft: str
    hairline: str
    worker: str
    band: str
    named: str
    focus: str
    measured: str
    expected: str
    settings: tuple[str, ...]
    diverging: tuple[str, ...]
    severities: tuple[str, str, str]


LIGHT = Palette(
    surface="#ffffff",
    ink="#16202c",
    soft="#5d6876",
    hairline="#e7e9ec",
    worker="#7f9cc0",
    band="#c9d8ea",
    named="#c2362b",
    focus="#d9730d",
    measured="#1f5fae",
    expected="#8a94a1",
    settings=("#1f5fae", "#c76b14", "#2a8c6e", "#8a4f9e"),
    diverging=("#9c3d10", "#dd8f55", "#f4f4f2", "#6fa0d3", "#123f7d"),
    severities=("#38679f", "#9a5b00", "#b92d23"),
)

DARK = Palette(
    surface="#161b22",
    ink="#eef2f6",
    soft="#98a4b3",
    hairline="#29313c",
    worker="#7394bf",
    band="#2b405a",
    named="#f2776b",
    focus="#f5a54a",
    measured="#6fa8ec",
    expected="#7b8795",
    settings=("#6fa8ec", "#f0a04f", "#5cc4a0", "#c493d6"),
    diverging=("#d9702f", "#8a4a26", "#20262e", "#2f5d94", "#4388dc"),
    severities=("#84b3e8", "#eab04f", "#f2776b"),
)


def config(palette: Palette) -> dict[str, Any]:
    """Return the Vega-Lite configuration of a palette."""
    text = {"font": FONT, "fontSize": 11, "fill": palette.soft}
    return {
        "background": palette.surface,
        "font": FONT,
        "padding": {"left": 2, "right": 6, "top": 6, "bottom": 2},
        "view": {"stroke": None, "continuousHeight": 220},
        "axis": {
            "labelColor": palette.soft,
            "titleColor": palette.soft,
            "titleFontWeight": 400,
            "titleFontSize": 11,
            "labelFontSize": 11,
            "titlePadding": 8,
            "labelPadding": 5,
            "domainColor": palette.expected,
            "tickColor": palette.expected,
            "tickSize": 4,
            "gridColor": palette.hairline,
            "labelFlush": False,
        },
        "axisX": {"grid": False, "tickCount": 6},
        "axisY": {"tickCount": 5, "domain": False, "ticks": False},
        "header": {
            "labelColor": palette.ink,
            "labelFontSize": 12.5,
            "labelFontWeight": 600,
            "titleColor": palette.soft,
        },
        "title": {
            "color": palette.ink,
            "subtitleColor": palette.soft,
            "fontSize": 13,
            "fontWeight": 600,
            "subtitleFontSize": 11.5,
            "subtitlePadding": 4,
            "anchor": "start",
            "frame": "group",
            "offset": 8,
        },
        "legend": {
            "labelColor": palette.soft,
            "titleColor": palette.soft,
            "titleFontWeight": 400,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "gradientThickness": 10,
            "symbolBaseFillColor": palette.ink,
            "symbolBaseStrokeColor": palette.ink,
            "layout": {side: {"anchor": "end"} for side in ("top", "bottom")},
        },
        "range": {"category": list(palette.settings), "diverging": list(palette.diverging)},
        "style": {**_mark_styles(palette), "label": text, "guide-label": text},
    }


def _mark_styles(palette: Palette) -> dict[str, Any]:
    def line(color: str, width: float, **more: Any) -> dict[str, Any]:
        return {"color": color, "strokeWidth": width, "strokeJoin": "round", **more}

    def words(color: str, **more: Any) -> dict[str, Any]:
        return {"color": color, "font": FONT, "fontSize": 11, **more}

    severities: dict[str, Any] = {}  # the span of a finding's steps, and the sign at its beginning
    for name, colour in zip(("note", "warning", "error"), palette.severities, strict=True):
        severities[f"{name}-span"] = {"color": colour, "strokeWidth": 5, "strokeOpacity": 0.4}
        severities[f"{name}-sign"] = {"color": colour, "strokeWidth": 2}
    return {
        "mean": line(palette.ink, 2.2),
        "measured": line(palette.measured, 1.8),
        "expected": line(palette.expected, 1.6, strokeDash=[5, 4]),
        "worker": line(palette.worker, 1, strokeOpacity=0.7),
        "named": line(palette.named, 1.8),
        "focus": line(palette.focus, 2.6),
        "dot": {"color": palette.measured},
        "named-dot": {"color": palette.named},
        "whisker": line(palette.worker, 1.6),
        "setting": {"strokeWidth": 1.8, "strokeJoin": "round"},
        "band": {"color": palette.band, "fillOpacity": 0.85},
        "wash": {"color": palette.measured, "fillOpacity": 0.12},
        "crosshair": line(palette.soft, 1, strokeOpacity=0.7),
        "cell": {"stroke": palette.surface, "strokeWidth": 1},
        "crowded-cell": {"strokeWidth": 0},
        "absent": {"color": palette.ink},
        "absent-label": words(palette.surface, fontWeight=600),
        "diagonal": {"color": palette.hairline, "stroke": palette.surface, "strokeWidth": 1},
        "halo": {
            "stroke": palette.surface,
            "strokeWidth": 4,
            "strokeJoin": "round",
            "fontSize": 11,
        },
        "guide": line(palette.hairline, 1),
        **severities,
        "soft-label": words(palette.soft),
        "ink-label": words(palette.ink),
        "named-label": words(palette.named, fontWeight=600),
        "measured-label": words(palette.measured, fontWeight=600),
    }


_TEMPLATES = Path(__file__).parent / "templates"


VEGALITE = "6.1"  # the version of Vega-Lite that figures are written for, as vl-convert names it


def png_of(spec: Spec, tables: Tables, *, scale: float = 2.0) -> bytes:
    """Return a figure in the light mode as PNG; ``scale`` is pixels per unit of its size."""
    png: bytes = vl_convert.vegalite_to_png(
        {**spec, "datasets": tables.rows},
        vl_version=VEGALITE,
        scale=scale,
        config={**config(LIGHT), "padding": 24},
        allowed_base_urls=[],
    )
    return png


def render(
    template: str, context: Mapping[str, Any], figures: Mapping[str, Spec], tables: Tables
) -> str:
    """Return a page: a template under ``templates``, figures by name, and their data."""
    scripts = [vega_script(), page_script()]
    return fill(
        template,
        **context,
        style=Markup(style()),
        scripts=[Markup(script) for script in scripts],
        script_digests=[
            base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            for script in scripts
        ],
        figures=json_markup({"specs": figures, "datasets": columns(tables), "configs": configs()}),
    )


def fill(template: str, **context: Any) -> str:
    """Return a template filled in and writable; values are escaped unless they are ``Markup``."""
    page: str = _environment().get_template(template).render(context)
    return words.writable(page)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file whole: a reader sees the old one or the new one; RunError if that fails."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror or error}; {ELSEWHERE}") from error
    return path


@functools.cache
def vega_script() -> str:
    """Return the script that draws figures; making it takes seconds, so it is cached."""
    try:
        kept = cache_root() / f"vega-{VEGALITE}-{version('vl-convert-python')}.js"
    except RuntimeError:  # no home directory
        return _script(_bundle())
    found = read_own(kept)
    if found is None:
        found = _bundle().encode()
        with contextlib.suppress(OSError, RunError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with staged(kept, found) as hidden:
                hidden.chmod(0o600)
                hidden.replace(kept)
    return _script(found.decode())


def _bundle() -> str:
    snippet = "window.vegaEmbed = vegaEmbed;"
    bundle: str = vl_convert.javascript_bundle(snippet, vl_version=VEGALITE)
    return bundle


def page_script() -> str:
    """Return the script of every page: figures, modes and keys."""
    return _script("\n".join(source(name) for name in ("page.js", "keys.js")))


def style() -> str:
    """Return the style of every page."""
    return "\n".join(source(name) for name in ("style.css", "frame.css"))


def source(name: str) -> str:
    """Return the text of a file under ``templates``."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def configs() -> dict[str, Any]:
    """Return the configurations of the light and of the dark mode."""
    return {"light": config(LIGHT), "dark": config(DARK)}


def columns(tables: Tables) -> dict[str, dict[str, list[Any]]]:
    """Return the data by columns, a third of the size of rows; the page's script turns it back."""
    return {
        name: {field: [row[field] for row in rows] for field in (rows[0] if rows else ())}
        for name, rows in tables.rows.items()
    }


def json_markup(value: Any) -> Markup:
    """Return a value as JSON that may stand inside a page: no name in it can become markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(sign, code)
    return Markup(text)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["whole"] = whole
    environment.filters["cause_text"] = cause_text
    environment.filters["breakable"] = breakable
    environment.filters["headings"] = re.compile('<h2 id="([^"]+)">([^<]+)</h2>').findall
    return environment


_LONG_NAME = re.compile(r"(?=[\w.]{25})[^\W\d]\w*(?:\.\w+)+")


def breakable(text: object) -> Markup:
    """Return a text as markup whose long names may break after a dot, and numbers not before %."""
    escaped = str(escape(text)).replace(" %", "&nbsp;%")
    return Markup(_LONG_NAME.sub(lambda name: name[0].replace(".", ".<wbr>"), escaped))


@functools.cache
def cause_text(name: str) -> Markup:
    """Return the documentation of a cause; empty without any."""
    text = cause_pages().get(name, "")
    return Markup(MarkdownIt("commonmark", {"html": False}).render(text))


def _script(source: str) -> str:
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")
