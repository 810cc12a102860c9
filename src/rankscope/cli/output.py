"""Standard output and error, which may be closed, full, or of few characters, while a command runs.

Exit code 1 means findings, so a reader that has gone must not cause it: the output of such a
command is dropped, and it ends with its own code.

All commands print with a margin, in lines of readable length, and records as plain words.
"""

import codecs
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table as Grid
from rich.text import Text

from rankscope.bus.words import printable

OnFailure = Callable[[str], None]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
"""The option that all commands have which print a result."""


def check_page_name(path: Path | None) -> Path | None:
    """Return the path of a page; a usage error for the name of a PDF, which is no page."""
    if path is not None and path.suffix.lower() == ".pdf":
        raise typer.BadParameter(
            f"expected a name that ends in .html, got {path}; for a PDF, print the page from a "
            "browser"
        )
    return path


HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page to this file.", callback=check_page_name),
]
"""The option of the commands that compare two trainings."""


def function_option(words: str) -> Any:
    """Return an option that names a function of the user's."""
    return typer.Option(metavar="MODULE:FUNCTION", help=words)


LEAST_COLUMNS = 20  # of a terminal, whatever the value of ``COLUMNS``: fewer hold no table

LONGEST = 112  # columns of the longest line
MARGIN = 2

_STANDARD_FILES = 3
_IN_ASCII = {
    **dict(zip("●○▲◆✓✗·–−×≈≠±…▁▂▃▄▅▆▇█", "*o!#+x---x~!~._.:=+*#@", strict=True)),
    "→": "->",
    "←": "<-",
    "≥": ">=",
}
"""Replacements of the signs that rankscope itself prints."""
_REPLACE = "rankscope.nearest"  # the handler of ``str.encode`` for signs that an encoding lacks


class GuardedStream:
    """A text stream that outlives its reader, as ``sys.stdout`` or ``sys.stderr``.

    Where its encoding lacks a sign, the nearest that it has is written, or a question mark. After
    an error (``failed``) nothing more is written, and nothing is raised: the command goes on.
    ``on_failure`` is called once with a sentence, but not for a reader that has gone.
    """

    def __init__(self, stream: Any, on_failure: OnFailure) -> None:
        self._stream = stream
        self._on_failure = on_failure
        self._gone = False
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> "GuardedStream":
        """The stream of bytes below, which outlives its reader, too."""
        return GuardedStream(self._stream.buffer, self._fail)

    def write(self, text: Any) -> int:
        """Write a text, or bytes to a stream of bytes; return its length."""
        self._try(lambda: self._write(text))
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write texts, as :meth:`write` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass the written text on to the reader."""
        self._try(self._stream.flush)

    def _write(self, text: Any) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, _REPLACE).decode(encoding))

    def _try(self, act: Callable[[], Any]) -> None:
        if self._gone:
            return
        try:
            act()
        except ConnectionError:  # a broken pipe is one
            self._leave()
        except OSError as error:
            self._leave()
            self._fail(
                f"cannot write to standard output ({error.strerror or error}); "
                "give it a place that can be written"
            )

    def _fail(self, sentence: str) -> None:
        self.failed = True
        self._on_failure(sentence)

    def _leave(self) -> None:
        """Discard Python's buffer of the stream, also when the process ends."""
        self._gone = True
        with suppress(OSError, ValueError):  # a stream without a file has no number
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


@contextmanager
def guarded_streams(on_failure: OnFailure) -> Iterator[GuardedStream]:
    """Print through streams that outlive their readers; yield standard output."""
    out = sys.stdout
    err = sys.stderr
    streams: Any = sys
    with _standard_files() as number, os.fdopen(number, "w", encoding="utf-8") as nowhere:
        # A stream is None where the process was started with it closed.
        streams.stdout = guarded = GuardedStream(out or nowhere, on_failure)
        streams.stderr = GuardedStream(err or nowhere, lambda _: None)
        try:
            yield guarded
        finally:
            streams.stdout = out
            streams.stderr = err


@contextmanager
def _standard_files() -> Iterator[int]:
    """Open those of the three standard files that are closed, lest another takes their number.

    Yields one more file, which discards its content; the caller closes it.
    """
    opened = [os.open(os.devnull, os.O_RDWR)]
    while opened[-1] < _STANDARD_FILES:
        opened.append(os.open(os.devnull, os.O_RDWR))
    try:
        yield opened.pop()
    finally:
        for number in opened:
            os.close(number)


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that reads no markup, as wide as the terminal, or ``COLUMNS`` unless 0."""
    columns = os.environ.get("COLUMNS", "")
    unset = columns.isdecimal() and int(columns) == 0
    width = shutil.get_terminal_size().columns if unset else None
    console = Console(stderr=stderr, width=width, markup=False, emoji=False)
    if console.width < LEAST_COLUMNS:
        console.width = LEAST_COLUMNS
    return console


def show(console: Console, content: RenderableType) -> None:
    """Print with a margin, in lines that are not too long to read and end where the text does."""
    for line in readable_lines(console, content):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        console.print(Segments([Segment(" " * MARGIN), *line, Segment.line()]), end="")


def readable_lines(console: Console, content: RenderableType) -> list[list[Segment]]:
    """Return a content in the lines that :func:`show` prints."""
    options = console.options.update(width=min(console.width, LONGEST) - MARGIN)
    return console.render_lines(content, options, pad=False)


def print_json(result: Any) -> None:
    """Print plain JSON values as one document."""
    print(json.dumps(result, indent=2, allow_nan=False))


def table(*heads: str, right: Collection[str] = (), fold: bool = False) -> Grid:
    """Return a table without lines; columns of ``right`` hold numbers; long words ``fold``."""
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for head in heads:
        side: Literal["left", "right"] = "right" if head in right else "left"
        grid.add_column(
            head, justify=side, no_wrap=head in right, overflow="fold" if fold else "ellipsis"
        )
    return grid


def labels(rows: Iterable[tuple[str, str]]) -> Grid:
    """Return words with a label before each."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for label, words in rows:
        grid.add_row(plain(label, "dim"), plain(words))
    return grid


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


def verdict_head(look: tuple[str, str], word: str, subject: str, headline: str) -> Text:
    """Return a verdict with its sign and colour, its subject, and its headline below."""
    sign, colour = look
    return Text.assemble(
        (f"{sign} {word}", f"bold {colour}"),
        "  ",
        plain(subject, "dim"),
        "\n",
        plain(headline, "bold"),
    )


def labelled(label: str, words: str) -> Text:
    """Return words with a label before them."""
    return Text.assemble((f"{label}: ", "bold"), plain(words))


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of the signs that an encoding lacks, and where they end."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(sign, "?") for sign in lacking), error.end


codecs.register_error(_REPLACE, _nearest)
