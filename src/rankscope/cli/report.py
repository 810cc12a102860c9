"""``rankscope report``: the verdict of a run or a study and its files, or a directory's runs."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import count, printable, ranks_of_job
from rankscope.cli.output import JsonOption, heading, labelled, plain, show, table, terminal
from rankscope.cli.verdict import (
    NARROW,
    render_differences,
    render_run,
    render_study,
    render_summary,
)
from rankscope.errors import MissingExtraError, RankscopeError, RunError, UsageError
from rankscope.files import ELSEWHERE, is_directory, is_file, to_plain
from rankscope.record import Run
from rankscope.record.begin import last_writer
from rankscope.record.reader import no_run
from rankscope.record.stores import at_hand
from rankscope.report import write_figures, write_report, write_run_figures, write_study_report
from rankscope.report.live import catalog
from rankscope.report.live.catalog import (
    MAX_DIRECTORIES,
    UNREADABLE,
    Glance,
    glance,
    in_order,
    stamp,
    unreadable,
)
from rankscope.report.markdown import run_markdown, study_markdown
from rankscope.report.study_words import headline_of, is_study, open_study
from rankscope.verdict.assessment import Assessment, assess
from rankscope.verdict.diagnosis import diagnose_run, is_seen_live
from rankscope.verdict.rules import explanations, page_of, ranked
from rankscope.verdict.words import LOOKS, writable


class Format(StrEnum):
    """The formats of a report, in the order in which they are written."""

    HTML = "html"
    PNG = "png"
    MD = "md"
    JSON = "json"


NAMES = {
    Format.HTML: "report.html",
    Format.PNG: "figures",
    Format.MD: "report.md",
    Format.JSON: "report.json",
}
"""File names of the formats without --output; ``figures`` is a directory of PNG files."""
STDOUT = Path("-")


def chosen_formats(given: Sequence[str] | None, html: bool | None) -> list[Format]:
    """Return the formats of --format (names, or several with commas), --html and --no-html."""
    names = [name.strip().lower() for item in given or () for name in item.split(",")]
    known = [str(one) for one in Format]
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"'{name}' is not one of {', '.join(known)}", param_hint="'--format'"
            )
    wanted = set(names) if given else {"html"}
    wanted = wanted | {"html"} if html else wanted
    wanted = wanted - {"html"} if html is False else wanted
    return [one for one in Format if str(one) in wanted]


_SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}


def _format_named(output: Path | None, html: bool | None) -> list[str] | None:
    """Return the format that the name of --output asks for; None if it asks for none."""
    suffix = "" if output is None else output.suffix.lower()
    if suffix == ".pdf":
        raise UsageError(
            f"--output {output}: expected a name that ends in .html, .md or .json; for a PDF, "
            "print the page from a browser"
        )
    named = _SUFFIXES.get(suffix)
    return None if named is None or html is not None else [named]


def places(directory: Path, formats: Sequence[Format], output: Path | None) -> dict[Format, Path]:
    """Return where each format goes.

    ``output`` is a file for one format (for PNG its directory), a directory for several, ``-`` for
    standard output, or None for the run's or the study's directory.

    """
    if output is None:
        return {one: directory / NAMES[one] for one in formats}
    if output == STDOUT and (len(formats) != 1 or formats[0] not in {Format.MD, Format.JSON}):
        raise UsageError("--output - takes one format that is text: --format md or --format json")
    if len(formats) == 1 and not (is_directory(output) and formats[0] is not Format.PNG):
        return {formats[0]: output}
    return {one: output / NAMES[one] for one in formats}


def json_text(result: Mapping[str, Any]) -> str:
    """Return a result as JSON; undefined numbers become null."""
    return json.dumps(to_plain(result), indent=2, allow_nan=False) + "\n"


def _seen(markdown: Path, pictures: Sequence[Path]) -> list[str]:
    """Return the pictures' paths as seen from the Markdown file."""
    if markdown == STDOUT:
        return [path.as_posix() for path in pictures]
    return [Path(os.path.relpath(path, markdown.parent)).as_posix() for path in pictures]


def _put(path: Path, text: str) -> Path:
    """Write a text to a file, or to standard output; RunError if that fails."""
    text = writable(text)
    if path == STDOUT:
        sys.stdout.write(text)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; {ELSEWHERE}") from error
    return path


class Listing:
    """The runs in a directory and below, the worst first; RunError if it holds none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        root = directory.resolve()
        found = catalog.places(root)
        if not found.places:
            raise RunError(no_run(directory).replace("directory:", "directory, and holds none:"))
        self._cut = found.cut
        self._glances: list[Glance] = []
        for place in found.places.values():
            try:
                at = stamp(place, root)
                if at is not None:
                    self._glances.append(glance(place, at))
            except RunError as error:
                self._glances.append(unreadable(place, str(error)))
        self._glances = in_order(self._glances)
        self._now = time.time()

    @property
    def worst(self) -> Severity | None:
        """The worst severity; a run that cannot be read is a warning. None for none."""
        known = [_severity(each) for each in self._glances]
        return max((each for each in known if each is not None), default=None)

    @property
    def has_unreadable(self) -> bool:
        """Whether some run cannot be read."""
        return any(each.severity == UNREADABLE for each in self._glances)

    def render(self, console: Console) -> None:
        """Print a line for each run; each name in one piece, on a line of its own if it is long."""
        heading(console, count(len(self._glances), "run"), space=False)
        longest = max(cell_len(plain(each.place.name).plain) for each in self._glances)
        if console.width < NARROW or longest > console.width // 3:
            self._render_blocks(console)
        else:
            self._render_table(console)
        if self._cut:
            words = f"Only {MAX_DIRECTORIES:,} directories were looked at; name one further down."
            show(console, plain(words, "dim"))
        console.print()
        show(console, plain("Name one of them to see its verdict.", "dim"))

    def _render_table(self, console: Console) -> None:
        heads = ("Run", "Verdict", "State", "Workers", "Steps")
        grid = table(*heads, right=("Workers", "Steps"), fold=True)
        grid.columns[0].no_wrap = True
        grid.add_column("First finding", ratio=1)
        for each in self._glances:
            numbers = (f"{each.num_workers:,}", f"{each.num_steps:,}")
            state = each.state(self._now)
            grid.add_row(
                plain(each.place.name), _verdict_of(each), state, *numbers, _finding_of(each)
            )
        show(console, grid)

    def _render_blocks(self, console: Console) -> None:
        for each in self._glances:
            console.print(plain(f"  {each.place.name}", "bold"), soft_wrap=True)
            parts = [each.state(self._now), count(each.num_workers, "worker")]
            parts += [count(each.num_steps, "step"), _finding_of(each)]
            shown = parts[3:] if console.width < NARROW else parts
            words = Text.assemble(_verdict_of(each), "  ", " · ".join(filter(None, shown)))
            show(console, Padding(words, (0, 0, 0, 2)))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of a directory of runs."""
        return {
            "kind": "runs",
            "path": str(self.directory),
            "severity": None if self.worst is None else str(self.worst),
            "runs": [
                {
                    "path": str(self.directory / each.place.name),
                    "verdict": each.severity,
                    "state": each.state(self._now),
                    "num_workers": each.num_workers,
                    "num_steps": each.num_steps,
                    "headline": each.headline or None,
                    "since_step": each.since_step,
                }
                for each in self._glances
            ],
        }


def _verdict_of(each: Glance) -> Text:
    unread = each.severity == UNREADABLE
    sign, colour = ("?", "red") if unread else LOOKS[each.severity][:2]
    return Text(f"{sign} {each.severity}", style=colour)


def _finding_of(each: Glance) -> str:
    since = "" if each.since_step is None else f", since step {each.since_step:,}"
    return printable(f"{each.headline}{since}")


def _severity(each: Glance) -> Severity | None:
    if each.severity == UNREADABLE:
        return Severity.WARNING
    return None if each.severity in ("healthy", "early") else Severity[each.severity.upper()]


class FailOn(StrEnum):
    """The severities that can turn the exit code to 1."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The files and the text that the command makes.

    ``where`` is the place of each format; ``explicit``: the formats were named with --format;
    ``asked``: or by --html or --output; a page that was not is left out where nobody can write it;
    ``quiet``: standard output is for a file's content alone; ``full``: print all, not a summary.
    """

    as_json: bool
    where: Mapping[Format, Path]
    explicit: bool
    asked: bool
    quiet: bool
    full: bool

    def deliver(
        self,
        result: dict[str, Any],
        show: Callable[[], None],
        *,
        page: Callable[[Path], Path],
        pictures: Callable[[Path], list[Path]],
        markdown: Callable[[list[str]], str],
    ) -> None:
        """Write the files; then show the verdict and their paths, or print the result as JSON.

        The verdict is shown, too, when a file cannot be written. ``markdown`` takes the paths of
        the pictures.
        """
        written: dict[Format, list[Path]] = {}

        def write(one: Format, path: Path) -> list[Path]:
            if one is Format.HTML:
                return [page(path)]
            if one is Format.PNG:
                return pictures(path)
            if one is Format.JSON:
                return [_put(path, json_text(result))]
            return [_put(path, markdown(_seen(path, written.get(Format.PNG, []))))]

        try:
            for one, path in self._writable().items():
                try:
                    written[one] = write(one, path)
                except RankscopeError as error:  # the other formats are written
                    missing = isinstance(error, MissingExtraError)
                    if self.explicit if missing else self.asked:
                        raise
                    terminal(stderr=True).print(plain(str(error)), soft_wrap=True)
        except RankscopeError:
            if not self.as_json and not self.quiet:
                show()
            raise
        self._show(written, result, show)

    def _writable(self) -> Mapping[Format, Path]:
        """Return the place of each format, without one that was not asked for and is read-only."""
        if self.asked or all(os.access(path.parent, os.W_OK) for path in self.where.values()):
            return self.where
        said = "no page is written, as its directory is read-only; name a file with --output"
        terminal(stderr=True).print(plain(said), soft_wrap=True)
        return {}

    def _show(
        self,
        written: Mapping[Format, Sequence[Path]],
        result: dict[str, Any],
        show: Callable[[], None],
    ) -> None:
        if self.as_json:
            paths = [str(path) for files in written.values() for path in files]
            result |= {"written": paths} if self.explicit else {}
            pages = written.get(Format.HTML)
            sys.stdout.write(json_text({**result, "report": str(pages[0]) if pages else None}))
        elif not self.quiet:
            show()
            for one, files in written.items():
                label = "  Report" if one is Format.HTML else "  Written"
                for path in files:
                    terminal().print(labelled(label, str(path)), soft_wrap=True)


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A run's directory, a study's, or one that holds runs; here or, as s3://…, in an "
            "object store.",
        ),
    ],
    as_json: JsonOption = False,
    fail_on: Annotated[
        FailOn, typer.Option(help="The least severity that makes the exit code 1.")
    ] = FailOn.ERROR,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="html|md|json|png",
            help="What to write: a page, Markdown, JSON, PNG files. Repeat it, or use commas.",
            show_default="html",
        ),
    ] = None,
    html: Annotated[
        bool | None,
        typer.Option("--html/--no-html", help="Whether to write the page."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The file; a directory for PNG files or several formats; - for standard output.",
            show_default="report.html, report.md, report.json, figures/ in that directory",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print every finding and number, not the summary.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Diagnose the run's tables again, and show differences from findings.jsonl.",
        ),
    ] = False,
) -> None:
    """Show the verdict of a run or a study, and write its report; or list a directory's runs.

    The page is one file that opens offline. Exit code: 0 healthy, or nothing as severe as
    --fail-on; 1 findings at or above it; 2 bad usage or input.
    """
    chosen = chosen_formats(formats or _format_named(output, html), html)
    quiet = output == STDOUT
    if quiet and as_json:
        raise UsageError("--json and --output - both write to standard output: use one of them")
    given = path
    path = at_hand(path)
    beside = path if path == given else Path()  # of one in a store, files are written here
    asked = bool(formats or html or output)
    wanted = _Wanted(as_json, places(beside, chosen, output), bool(formats), asked, quiet, full)
    unreadable = False
    if is_study(path):
        if again:
            raise UsageError(f"--again takes a run, and {path} is a study: name one of its runs")
        severity = _report_study(path, wanted)
    elif is_directory(path) and not any(
        is_file(path / name) for name in ("run.json", "study.json")
    ):
        if again or formats or output:
            raise UsageError(
                f"{path} is no run: name one of the runs in it (see them without options)"
            )
        listing = Listing(path)
        if as_json:
            sys.stdout.write(json_text(listing.to_json()))
        else:
            listing.render(terminal())
        severity = listing.worst
        unreadable = listing.has_unreadable
    else:
        severity = _report_run(path, wanted, again=again)
    if severity is not None and severity >= Severity[fail_on.name]:
        raise typer.Exit(1)
    if unreadable:
        raise typer.Exit(2)


def _report_run(path: Path, wanted: _Wanted, *, again: bool) -> Severity | None:
    if is_file(path / "study.json"):
        raise RunError(
            f"the study in {path} has no summary.json yet: wait until it has finished, continue "
            f"it with rankscope study --resume, or report one of the runs in {path / 'runs'}"
        )
    run = _closed_run(path)
    differences: list[str] | None = None
    if again:
        seen_live = filter(is_seen_live, run.findings())
        diagnosed = (*diagnose_run(run), *seen_live)
        differences = _differences(run.findings(), diagnosed)
        run = run.with_findings(diagnosed)
    assessment = assess(run)
    result = run_result(run, assessment, differences)

    def show() -> None:
        with ranks_of_job(run.info):
            (render_run if wanted.full else render_summary)(run, assessment, terminal())
        if differences is not None:
            render_differences(differences, run.status, terminal())

    wanted.deliver(
        result,
        show,
        page=partial(write_report, run),
        pictures=partial(write_run_figures, run),
        markdown=partial(run_markdown, run, assessment),
    )
    severities = [finding.severity for finding in run.findings()]
    if assessment.severity is not None:
        severities.append(assessment.severity)
    return max(severities, default=None)


_WRITING_SECONDS = 10.0  # for which a run is waited for whose training has ended


def _closed_run(path: Path) -> Run:
    """Open a run; if its training has ended and its agent still writes, wait for a while."""
    run = Run.open(path)
    until = time.monotonic() + _WRITING_SECONDS
    while last_writer(run.path, run.info) is not None and time.monotonic() < until:
        time.sleep(0.1)
        run = Run.open(path)
    return run


def run_result(
    run: Run, assessment: Assessment | None = None, differences: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the JSON document of a run, with the differences of a new diagnosis if given."""
    assessment = assessment or assess(run)
    found = ranked(run.findings())
    causes = explanations(found)
    findings = [
        {
            **finding.to_json(),
            "consequence_of": getattr(causes[finding.id], "id", None),
            "page": page_of(finding.id, finding.cause),
        }
        for finding in found
    ]
    return {
        "kind": "run",
        "path": str(run.path),
        "status": run.status,
        "ended": run.info.get("ended", []),
        "severity": None if assessment.severity is None else str(assessment.severity),
        "headline": assessment.headline,
        "statements": list(assessment.statements),
        "recommendation": assessment.recommendation,
        "command": assessment.command or None,
        "values": assessment.values,
        "findings": findings,
        **({} if differences is None else {"differences": differences}),
    }


def _differences(recorded: Iterable[Finding], again: Iterable[Finding]) -> list[str]:
    """Return how each finding of a new diagnosis differs from ``findings.jsonl``."""
    before, after = ({one.id: _comparable(one) for one in found} for found in (recorded, again))
    differences = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            differences.append(f"{name}: only in findings.jsonl")
        elif name not in before:
            differences.append(f"{name}: not in findings.jsonl")
        else:
            one = before[name]
            other = after[name]
            changed = [key for key in one if one[key] != other[key]]
            if changed:
                differences.append(f"{name}: other {', '.join(changed).replace('_', ' ')}")
    return differences


def _comparable(finding: Finding) -> dict[str, Any]:
    """Return a finding as the file holds it, without its time of writing."""
    event: dict[str, Any] = to_plain(finding.to_json())
    del event["step"]
    return event


def _report_study(path: Path, wanted: _Wanted) -> Severity | None:
    study = open_study(path)
    word, headline = headline_of(study.entries)
    worst = None if word in ("healthy", "early") else Severity[word.upper()]
    result: dict[str, Any] = {
        "kind": "study",
        "path": str(path),
        "severity": None if worst is None else str(worst),
        "headline": headline,
        "entries": [entry.values for entry in study.entries],
    }
    wanted.deliver(
        result,
        lambda: render_study(path, terminal()),
        page=partial(write_study_report, path),
        pictures=partial(write_figures, path),
        markdown=partial(study_markdown, study),
    )
    return worst
