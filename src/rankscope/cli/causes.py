"""``rankscope causes``: the meaning of a finding, and advice."""

import json
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table as Grid

from rankscope.bus.detector import RULES
from rankscope.cli.output import JsonOption, heading, plain, show, terminal
from rankscope.errors import UsageError
from rankscope.verdict.rules import cause_pages, page_of_causes


def causes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A cause, such as data.worker_outlier, or a title; all without one.",
            metavar="NAME",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Print the whole page of causes as Markdown.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain a finding: how it looks, what led to it elsewhere, and what to do."""
    if page:
        print(page_of_causes(), end="")
        return
    known = {name: rule.title for name, rule in RULES.items()}
    by_title = {title.lower(): each for each, title in known.items()}
    name = None if name is None else by_title.get(name.lower(), name)
    if name is not None and name not in known:
        raise UsageError(f"expected the name of a cause, got {name!r}{_instead(name, known)}")
    if name is None:
        _list(known, as_json=as_json)
    elif as_json:
        print(json.dumps({"name": name, "title": known[name], "text": cause_pages()[name]}))
    else:
        heading(terminal(), f"{known[name]}  {name}", space=False)
        show(terminal(), Markdown(cause_pages()[name]))


def _instead(name: str, known: dict[str, str]) -> str:
    words = name.lower().replace("_", " ").split()
    near = [
        one
        for one, title in known.items()
        if words and all(word in f"{one} {title}".lower() for word in words)
    ] or get_close_matches(name, known, n=3)
    suggested = f"did you mean {' or '.join(near[:5])}? " if near else ""
    return f": {suggested}rankscope causes lists all of them"


def _list(known: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"name": name, "title": title} for name, title in known.items()]))
        return
    grid = Grid("name", "finding", box=None, pad_edge=False)
    for name, title in known.items():
        grid.add_row(plain(name), plain(title))
    show(terminal(), grid)
