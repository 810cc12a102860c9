r"""One HTML file that needs nothing else: template, style, scripts, figures and their data.

The file carries a content security policy that lets a browser run these scripts only, by their
digests, and open no connection at all. Names from a run pass through Jinja's escaping, or through
JSON in which ``<`` is written ``\u003c``; so they can never become markup.
"""

import base64
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markdown_it import MarkdownIt
from markupsafe import Markup

from rankscope.diagnose.causes import cause_pages
from rankscope.errors import RunError
from rankscope.web import theme, words
from rankscope.web.parts import Spec, Tables

_TEMPLATES = Path(__file__).parent / "templates"


VEGALITE = "6.1"
"""The version of Vega-Lite that figures are written for, as vl-convert names it."""


def png_of(spec: Spec, tables: Tables, *, scale: float = 2.0) -> bytes:
    """Return a figure in the light mode as PNG; ``scale`` is pixels per unit of its size."""
    png: bytes = vl_convert.vegalite_to_png(
        {**spec, "datasets": tables.rows},
        vl_version=VEGALITE,
        scale=scale,
        config={**theme.config(theme.LIGHT), "padding": 24},
        allowed_base_urls=[],
    )
    return png


def render(
    template: str, context: Mapping[str, Any], figures: Mapping[str, Spec], tables: Tables
) -> str:
    """Return the page.

    Args:
        template: File name under ``templates``.
        context: What the template shows.
        figures: Vega-Lite specifications by the name that the template places them under.
        tables: The data of these figures.
    """
    scripts = [vega_script(), page_script()]
    return fill(
        template,
        **context,
        style=Markup(style()),
        scripts=[Markup(script) for script in scripts],
        script_digests=[_digest(script) for script in scripts],
        figures=json_markup({"specs": figures, "datasets": columns(tables), "configs": configs()}),
    )


def fill(template: str, **context: Any) -> str:
    """Return a template filled in; what it is given is escaped unless it is ``Markup``.

    What in a directory's name is no UTF-8 becomes a question mark.
    """
    page: str = _environment().get_template(template).render(context)
    return words.writable(page)


def write_text(path: Path, text: str) -> Path:
    """Write a file whole: a reader sees the old one or the new one.

    Raises:
        RunError: It cannot be written.
    """
    return write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file whole: a reader sees the old one or the new one.

    Raises:
        RunError: It cannot be written.
    """
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
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; "
            "make the directory writable or name another file"
        ) from error
    return path


@functools.cache
def vega_script() -> str:
    """Return the script that draws figures; making it the first time takes a few seconds."""
    snippet = "window.vegaEmbed = vegaEmbed;"
    return _script(vl_convert.javascript_bundle(snippet, vl_version=VEGALITE))


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
    return {"light": theme.config(theme.LIGHT), "dark": theme.config(theme.DARK)}


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
    environment.filters["number"] = words.number
    environment.filters["whole"] = words.whole
    environment.filters["cause_text"] = cause_text
    return environment


@functools.cache
def cause_text(name: str) -> Markup:
    """Return what the documentation says of a cause; empty where it says nothing."""
    text = cause_pages().get(name, "")
    return Markup(MarkdownIt("commonmark", {"html": False}).render(text))


def _script(source: str) -> str:
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
