"""How all commands print: with a margin, in lines of readable length, records as plain words."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table as Grid
from rich.text import Text

LONGEST = 112
"""Columns of the longest line."""
MARGIN = 2


def show(console: Console, content: RenderableType) -> None:
    """Print with a margin, in lines that are not too long to read and end where the text does."""
    options = console.options.update(width=min(console.width, LONGEST) - MARGIN)
    for line in console.render_lines(content, options, pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        console.print(Segments([Segment(" " * MARGIN), *line, Segment.line()]), end="")


def heading(console: Console, words: str, *, space: bool = True) -> None:
    """Print the heading of a part."""
    if space:
        console.print()
    show(console, plain(words, "bold underline"))


def points(console: Console, sentences: Iterable[str]) -> None:
    """Print sentences as a list."""
    grid = Grid.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column()
    for sentence in sentences:
        grid.add_row("·", plain(sentence))
    show(console, grid)


def plain(words: str, style: str = "") -> Text:
    """Return text from records: never read as markup, without control characters."""
    return Text(printable(words), style=style)


def printable(words: str) -> str:
    """Return words with a space in place of each control character."""
    return "".join(sign if sign.isprintable() else " " for sign in words)
