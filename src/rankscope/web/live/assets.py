"""Scripts and style of the live page: the same for all pages, kept by browsers for good."""

import functools
import gzip
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import vl_convert

from rankscope.web.document import page_script, source, style, vega_script, vegalite_version

GZIP_LEVEL = 6

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
    return Asset(kind, gzip.compress(text().encode(), GZIP_LEVEL, mtime=0))


_SOURCES: dict[str, tuple[str, Callable[[], str]]] = {
    "vega.js": ("text/javascript", vega_script),
    "page.js": ("text/javascript", page_script),
    "live.js": ("text/javascript", lambda: source("morph.js") + source("live.js")),
    "style.css": ("text/css", lambda: style() + source("live.css")),
    "icon.svg": ("image/svg+xml", lambda: ICON),
}


@functools.cache
def _tags() -> dict[str, str]:
    """Return a part of each asset's address that its content decides.

    The large script is known by the versions that make it: making it takes seconds, and the first
    page does not wait for that.
    """
    large = f"{getattr(vl_convert, '__version__', '')} {vegalite_version()}"
    texts = {name: large if name == "vega.js" else text() for name, (_, text) in _SOURCES.items()}
    return {
        name: hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        for name, text in texts.items()
    }
