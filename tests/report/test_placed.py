"""Every figure that has a title has a place on the page, and the other way round."""

import re
from pathlib import Path

from rankscope.report import page
from rankscope.verdict import words

TEMPLATES = Path(page.__file__).parent / "templates"


def test_every_figure_has_a_title_and_a_place():
    text = "".join(path.read_text() for path in sorted(TEMPLATES.glob("*.html")))
    placed = set(re.findall(r'\bfigure\([a-z_]+, "([a-z_-]+)"', text))
    placed |= set(re.findall(r'data-figure="\{\{ view\.key \}\}([a-z_-]+)"', text))
    assert placed == set(words.TITLES)
