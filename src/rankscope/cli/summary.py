"""A run's verdict in few lines: what is wrong, what to do, one line for each finding."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from rankscope.cli.output import plain, readable_lines, show
from rankscope.cli.verdict import (
    LOOK,
    NARROW,
    labelled,
    numbers_grid,
    show_command,
    verdict_lines,
)
from rankscope.core.finding import Finding
from rankscope.diagnose.assessment import Assessment
from rankscope.diagnose.causes import section_of
from rankscope.diagnose.rules import count, explanations, listed, ranked
from rankscope.record import Run
from rankscope.web.words import (
    ranks_in_words,
    steps_in_words,
    tiles,
    title_of,
    title_of_finding,
)

SUMMARY_LINES = 12
"""Lines on a terminal of 80 columns at most, with the two that say where there is more."""

_ACTION = "What to do"
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def render_summary(run: Run, assessment: Assessment, console: Console) -> None:
    """Print a run's verdict in :data:`SUMMARY_LINES` lines; on a narrow terminal, in a few more.

    Raises:
        RunError: The findings cannot be read.
    """
    found = ranked(run.findings())
    causes = explanations(found)
    heads = [finding for finding in found if causes[finding.id] is None]
    followers = len(found) - len(heads)
    sheet = _Sheet(console, SUMMARY_LINES - 2 - bool(assessment.command))
    title = title_of(run.info, run.path)
    sheet.add(verdict_lines(assessment.word, assessment.headline, title))
    kept_free = min(len(heads), 2) + (len(heads) > 2 or followers > 0)
    sheet.add(_action(assessment.recommendation, sheet, kept_free))
    shown = 0
    for finding in heads:
        line = _line(finding, run.num_workers)
        is_last = finding is heads[-1] and not followers
        if shown and not sheet.fits(line, kept_free=0 if is_last else 1):
            break
        sheet.add(line)
        shown += 1
    if rest := _rest(heads[shown:], followers):
        sheet.add(plain(rest, "dim"))
    if not found:
        numbers, narrow = tiles(assessment.values), console.width < NARROW
        while numbers and not sheet.fits(numbers_grid(numbers, narrow=narrow)):
            numbers.pop()
        sheet.add(numbers_grid(numbers, narrow=narrow))
    sheet.show()
    show_command(assessment.command, console)
    more = labelled("  More", f"rankscope report {shlex.quote(str(run.path))} --full")
    console.print(more, soft_wrap=True)  # in one piece, to be pasted


class _Sheet:
    """Parts that are printed one below the other, of which few lines are left.

    Attributes:
        room: Lines that are left.
    """

    def __init__(self, console: Console, room: int) -> None:
        self._console, self.room = console, room
        self._parts: list[RenderableType] = []

    def fits(self, part: RenderableType, *, kept_free: int = 0) -> bool:
        """Return whether a part fits, with some lines kept free."""
        return len(readable_lines(self._console, part)) + kept_free <= self.room

    def add(self, part: RenderableType) -> None:
        """Add a part."""
        self._parts.append(part)
        self.room -= len(readable_lines(self._console, part))

    def show(self) -> None:
        """Print all parts, apart from each other as far as lines are left."""
        for place, part in enumerate(self._parts):
            if place in (1, 2) and self.room > 0:
                self._console.print()
                self.room -= 1
            show(self._console, part)


def _action(words: str, sheet: _Sheet, kept_free: int) -> Text:
    """Return as many sentences of what to do as fit, but the first at least."""
    whole = labelled(_ACTION, words)
    if sheet.fits(whole, kept_free=kept_free):
        return whole
    sentences = _SENTENCE.split(words)
    begun = [labelled(_ACTION, " ".join([*sentences[:n], "…"])) for n in range(1, len(sentences))]
    fitting = [text for text in begun if sheet.fits(text, kept_free=kept_free)]
    return [*begun[:1], *fitting, whole][len(fitting) if begun else 0]


def _line(finding: Finding, num_workers: int) -> Text:
    """Return a finding in a line: what it is, of whom, when, and its name in the documentation."""
    sign, colour = LOOK[str(finding.severity)]
    where = f"{ranks_in_words(finding.ranks, num_workers)} · {steps_in_words(finding)}"
    return Text.assemble(
        (f"{sign} ", f"bold {colour}"),
        plain(title_of_finding(finding), "bold"),
        "  ",
        plain(where, colour),
        "  ",
        plain(section_of(finding.id, finding.cause), "dim"),
    )


def _rest(findings: Sequence[Finding], followers: int) -> str:
    """Return how many findings have no line of their own; empty for none."""
    severities = Counter(str(finding.severity) for finding in findings)
    words = [count(number, severity) for severity, number in severities.items()]
    if followers:
        words.append(f"{count(followers, 'consequence')} of the above")
    return f"Also {listed(words)}." if words else ""
