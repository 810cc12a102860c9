"""What the site has beyond the files in ``docs/``, made while it is built.

- ``causes/``: a page for every finding, cut from ``causes.md``, which stays one file to read and
  to edit. Links to its sections lead to these pages.
- ``notebook.md``, from the cells and outputs of ``notebook.ipynb``.
- The faults in ``gallery.md``, from ``gallery.json``.
- ``reference/cli.md``: the help of every command, from the command line itself.
- The tables of columns in ``runs.md``, from the signal registry.
- ``files/``: files outside of ``docs/`` that pages link to (tests, examples), as they are.
- Entries of the navigation that end in a slash: all pages of that folder.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rankscope.bus.detector import RULES
from rankscope.bus.evidence import Table
from rankscope.cli.main import NAME, app
from rankscope.evidence import columns_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CAUSES = "causes.md"
CLI = "reference/cli.md"
RUNS = "runs.md"
NOTEBOOK = "notebook.md"
GALLERY, FAULTS = "gallery.md", "<!-- faults -->"
COLUMNS = re.compile(r"^<!-- columns of (?P<table>\w+) -->$", re.M)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
SECTION = re.compile(r"^## `(?P<name>[^`]+)`$\n(?P<text>.*?)(?=^## |\Z)", re.M | re.S)
FAMILY = re.compile(r"^\*\*(?P<name>.+)\*\*$\n(?P<rows>(?:^(?:\|.*)?$\n)+)", re.M)
ROW = re.compile(r"^\| \[`(?P<name>[^`]+)`\]\(#\S+\) \| [^|]+ \| (?P<evidence>[^|]+) \|", re.M)
PART = re.compile(r"^\*\*(Looks like|In practice|May come from|Comes from|Do):\*\*\s+(.)", re.M)
TITLES = {"Looks like": "How it looks", "Do": "What to do"}
HELP_WIDTH = 92
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".md": "markdown", ".js": "js"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the folders of the navigation, except for pages that it names itself."""
    nav: list[Any] = config.nav or []
    config.nav = _expanded(nav, set(_named(nav)))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files in ``docs/``."""
    made = {f"causes/{_anchor(name)}.md": _cause_page(name) for name in RULES}
    made[CLI] = _cli_page()
    made[NOTEBOOK] = _notebook_page()
    for source in list(files.documentation_pages()):
        made |= _linked_files(source.src_uri, source.content_string)
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has what they mean."""
    uri = page.file.src_uri
    if uri == CAUSES:
        markdown = markdown[: SECTION.search(markdown).start()]  # type: ignore[union-attr]
    if uri == RUNS:
        markdown = COLUMNS.sub(lambda found: _columns(Table(found["table"])), markdown)
    if uri == GALLERY:
        markdown = markdown.replace(FAULTS, _faults())
    if uri.startswith("files/"):
        return markdown
    return LINK.sub(lambda link: f"]({_target(uri, link[1], link[2] or '')})", markdown)


def _named(nav: Any) -> list[str]:
    if isinstance(nav, dict):
        nav = list(nav.values())
    return [nav] if isinstance(nav, str) else [uri for entry in nav for uri in _named(entry)]


def _expanded(nav: list[Any], named: set[str]) -> list[Any]:
    """Return a navigation without folders; a section without any page is left out."""
    filled: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/"):
            filled += _pages(entry, named)
        elif isinstance(entry, dict):
            [(title, content)] = entry.items()
            if isinstance(content, str) and content.endswith("/"):
                content = _pages(content, named)
            elif isinstance(content, list):
                content = _expanded(content, named)
            filled += [{title: content}] if content else []
        else:
            filled.append(entry)
    return filled


def _pages(folder: str, named: set[str]) -> list[Any]:
    """Return a folder's pages in the order of its index, those that it leaves out at the end."""
    if folder == "causes/":
        return [
            {family["name"]: [f"causes/{_anchor(row['name'])}.md" for row in _rows(family)]}
            for family in FAMILY.finditer(_causes())
        ]
    paths = sorted((DOCS / folder).glob("*.md"))
    index = DOCS / folder / "index.md"
    order = index.read_text("utf-8") if index.exists() else ""
    paths.sort(key=lambda path: (order.find(f"({path.name})") % (len(order) + 1), path.name))
    uris = [path.relative_to(DOCS).as_posix() for path in paths]
    return [uri for uri in uris if uri not in named]


def _causes() -> str:
    return (DOCS / CAUSES).read_text("utf-8")


def _rows(family: re.Match[str]) -> list[re.Match[str]]:
    return list(ROW.finditer(family["rows"]))


def _anchor(name: str) -> str:
    return name.replace(".", "")


def _cause_page(name: str) -> str:
    """Return the page of one finding: its section, under the title that reports give it."""
    [text] = [section["text"] for section in SECTION.finditer(_causes()) if section["name"] == name]
    rows = [row for family in FAMILY.finditer(_causes()) for row in _rows(family)]
    [evidence] = [row["evidence"].strip() for row in rows if row["name"] == name]
    severities = ", ".join(map(str, RULES[name].advice))
    text = PART.sub(lambda part: f"## {TITLES.get(part[1], part[1])}\n\n{part[2].upper()}", text)
    head = "| finding | severity | evidence |\n|---|---|---|"
    return f"# {RULES[name].title}\n\n{head}\n| `{name}` | {severities} | {evidence} |\n{text}"


def _cli_page() -> str:
    """Return the help of every command, as the command line prints it."""
    parts = ["# Command line\n\nWhat each command prints with `--help`.\n"]
    root = typer.main.get_command(app)
    commands = [(NAME, root)]
    while commands:
        name, command = commands.pop(0)
        context = command.context_class(command, info_name=name, terminal_width=HELP_WIDTH)
        parts.append(f"## `{name}`\n\n```text\n{command.get_help(context)}\n```\n")
        inner = getattr(command, "commands", {})
        commands = [(f"{name} {key}", value) for key, value in inner.items()] + commands
    return "\n".join(parts)


def _columns(table: Table) -> str:
    """Return the columns of a table of the record."""
    rows = [f"| `{s.name}` | `{s.dtype}` | {s.unit} | {s.meaning} |" for s in columns_of(table)]
    return "\n".join(["| column | type | unit | meaning |", "|---|---|---|---|", *rows])


def _notebook_page() -> str:
    """Return the notebook as it was executed: its cells, and what each has put out."""
    parts = []
    for cell in json.loads((DOCS / "notebook.ipynb").read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            html = "".join(data.get("text/html", ""))
            if html and "<style" not in html:
                parts.append(f"<div>{html}</div>")
            else:
                told = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{told.rstrip()}\n```")
    return "\n\n".join(parts)


def _faults() -> str:
    """Return every fault of the bench: a picture, its finding, and what to check."""
    parts = []
    for name, fault in json.loads((DOCS / "gallery.json").read_text("utf-8")).items():
        seen = f" Seen in {', '.join(fault['seen'])}." if fault["seen"] else ""
        told = "Nothing is found: a run holds no evidence of it."
        if name.startswith("H"):
            told = "Nothing is found, as it should be."
        if "cause" in fault:
            cause = fault["cause"]
            link = f"[`{cause}`]({CAUSES}#{_anchor(fault['section'])})"
            told = f"**{link}** ({fault['severity']}): {fault['says']}\n\n{fault['next']}"
        parts.append(
            f"## {name}: {fault['what']}\n\n![Averaged loss, and the workers in every step]"
            f"(figures/gallery/{name}.png)\n\n{told}{seen}"
        )
    return "\n\n".join(parts)


def _linked_files(uri: str, text: str | None) -> dict[str, str]:
    """Return pages with the files outside of ``docs/`` that one page links to."""
    pages = {}
    for link in LINK.finditer(text or ""):
        path = _outside(uri, link[1])
        if path is not None and (ROOT / path).is_file():
            content = (ROOT / path).read_text("utf-8")
            language = LANGUAGES.get(Path(path).suffix, "text")
            fence = "`" * 5
            pages[_home(path)] = f"# {path}\n\n{fence}{language}\n{content}\n{fence}\n"
    return pages


def _outside(uri: str, target: str) -> str | None:
    """Return the path that a link means, from the project's root, if that is not in ``docs/``."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target))
    return None if path.startswith("docs/") or not target else path


def _home(path: str) -> str:
    return f"files/{path.replace('/', '-').removeprefix('.')}.md"


def _target(uri: str, target: str, anchor: str) -> str:
    """Return where a link on a page leads in the site."""
    target = target.replace("notebook.ipynb", NOTEBOOK)
    folder = posixpath.dirname(uri)
    here = CAUSES if uri.startswith("causes/") and not target else uri
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(here), target)) if target else here
    if uri.startswith("causes/") and target:
        meant = posixpath.normpath(target)  # it was written in causes.md
    if meant == CAUSES and anchor.removeprefix("#") in map(_anchor, RULES):
        return posixpath.relpath(f"causes/{anchor.removeprefix('#')}.md", folder or ".")
    outside = _outside("causes.md" if uri.startswith("causes/") else uri, target)
    if outside is not None:
        return posixpath.relpath(_home(outside), folder or ".")
    if uri.startswith("causes/") and target:
        return posixpath.relpath(meant, folder) + anchor
    return target + anchor
