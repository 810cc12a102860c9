"""The page of causes, ``docs/causes.md``: what each finding means, shipped with the package."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

import rankscope
from rankscope.diagnose.rules import RULES

_HEADING = re.compile(r"^## `(.+)`$", re.M)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


def section_of(finding_id: str, cause: str) -> str:
    """Return the name of the section about a finding: its own rule's, or its cause's."""
    return finding_id if finding_id in RULES else cause


def page_of(finding_id: str, cause: str) -> str:
    """Return where the documentation explains a finding: a file of the project, and its section."""
    return f"docs/causes.md#{section_of(finding_id, cause).replace('.', '')}"


@cache
def cause_pages() -> dict[str, str]:
    """Return the sections about causes, as Markdown without links to other pages, by their names.

    Empty where the package was installed without its page.
    """
    own = files("rankscope.diagnose").joinpath("causes.md")
    checkout = Path(rankscope.__file__).parents[2] / "docs" / "causes.md"
    page = next((place for place in (own, checkout) if place.is_file()), None)
    if page is None:
        return {}
    _, *parts = _HEADING.split(_LINK.sub(r"\1", page.read_text("utf-8")))
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
