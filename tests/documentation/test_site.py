"""The documentation site: builds without a warning, has all its pages, and loads nothing."""

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rankscope.bus.detector import RULES
from rankscope.bus.evidence import Table
from rankscope.cli.main import app
from rankscope.evidence import columns_of

ROOT = Path(__file__).parents[2]
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "WARNING" not in ended.stderr
    return folder


class Page(HTMLParser):
    """Collects what a page loads by itself, and its headings' text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in LOADS and values.get("rel") != "canonical":
            self.loads.append(values.get(LOADS[tag]) or "")


def test_no_page_loads_anything_from_outside(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(RULES)
    for path in pages:
        outside = [url for url in Page(path.read_text()).loads if "//" in url]
        assert outside == [], path.name
    for path in site.rglob("*.css"):
        imported = re.findall(r"(?:@import|url\()\s*['\"]?(\w+:)?//", path.read_text())
        assert imported == [], path.name


def test_every_finding_has_a_page_of_its_own(site):
    overview = (site / "causes.html").read_text()
    for name, rule in RULES.items():
        page = (site / "causes" / f"{name.replace('.', '')}.html").read_text()
        for heading in (rule.title, "How it looks", "What to do"):
            assert heading in page, f"{name}: {heading}"
        assert f'href="causes/{name.replace(".", "")}.html"' in overview


def test_every_page_can_be_reached_from_the_navigation(site):
    navigation = (site / "index.html").read_text()
    for path in ROOT.glob("docs/**/*.md"):
        place = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        link = place.replace("index.html", "") if place != "index.html" else place
        assert link in navigation, place


def test_every_command_is_in_the_reference(site):
    page = (site / "reference" / "cli.html").read_text()
    for command in app.registered_commands:
        assert f"rankscope {command.name or command.callback.__name__.rstrip('_')}" in page
    assert "--fail-on" in page


@pytest.mark.parametrize("table", Table)
def test_every_column_of_the_record_is_explained_and_no_other(site, table):
    page = (site / "runs.html").read_text()
    [text] = re.findall(rf'<h3 id="{table}">(.*?)(?=<h3|</article>)', page, re.S)
    cells = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>", text, re.S)
    assert [name for name, _ in cells] == [s.name for s in columns_of(table)]
    for (_, cell), signal in zip(cells, columns_of(table), strict=True):
        assert html.escape(signal.meaning, quote=False) in cell
