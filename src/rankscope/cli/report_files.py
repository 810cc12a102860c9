"""The files that ``rankscope report`` writes: their formats and places."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from rankscope.cli.output import plain, terminal
from rankscope.errors import MissingExtraError, RunError, UsageError
from rankscope.files import is_directory, to_plain
from rankscope.record import Run
from rankscope.report import write_figures, write_report, write_run_figures, write_study_report
from rankscope.report.markdown import run_markdown, study_markdown
from rankscope.report.study_words import Study
from rankscope.verdict.assessment import Assessment
from rankscope.verdict.words import writable


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
    """Return the formats to write.

    ``given`` are the values of --format, each a name or several with commas between them;
    ``html`` is True with --html, False with --no-html, None with neither.

    Raises:
        typer.BadParameter: There is no such format.
    """
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


def places(directory: Path, formats: Sequence[Format], output: Path | None) -> dict[Format, Path]:
    """Return where each format goes.

    ``output`` is a file for one format (for PNG its directory), a directory for several, ``-`` for
    standard output, or None for the run's or the study's directory.

    Raises:
        UsageError: ``-`` with other than one of md and json.
    """
    if output is None:
        return {one: directory / NAMES[one] for one in formats}
    if output == STDOUT and (len(formats) != 1 or formats[0] not in {Format.MD, Format.JSON}):
        raise UsageError("--output - takes one format that is text: --format md or --format json")
    if len(formats) == 1 and not (is_directory(output) and formats[0] is not Format.PNG):
        return {formats[0]: output}
    return {one: output / NAMES[one] for one in formats}


def run_writers(
    run: Run, assessment: Assessment, document: Callable[[], Mapping[str, Any]]
) -> "Writers":
    """Return the writer of each format of a run's report; ``document`` makes the JSON document."""
    return {
        Format.HTML: lambda path, _: [write_report(run, path)],
        Format.PNG: lambda path, _: write_run_figures(run, path),
        Format.MD: lambda path, pngs: [
            _put(path, run_markdown(run, assessment, _seen(path, pngs)))
        ],
        Format.JSON: lambda path, _: [_put(path, json_text(document()))],
    }


def study_writers(study: Study, document: Callable[[], Mapping[str, Any]]) -> "Writers":
    """Return the writers of a study's report."""
    return {
        Format.HTML: lambda path, _: [write_study_report(study.path, path)],
        Format.PNG: lambda path, _: write_figures(study.path, path),
        Format.MD: lambda path, pngs: [_put(path, study_markdown(study, _seen(path, pngs)))],
        Format.JSON: lambda path, _: [_put(path, json_text(document()))],
    }


Writers = Mapping[Format, Callable[[Path, Sequence[Path]], list[Path]]]


def write_files(
    writers: Writers, where: Mapping[Format, Path], *, explicit: bool
) -> dict[Format, list[Path]]:
    """Write the formats, and return the files of each.

    A missing package is an error if the formats are ``explicit``; otherwise a message on standard
    error, and the other formats are written.

    Raises:
        MissingExtraError: A package is missing.
        RunError: A file cannot be written.
    """
    written: dict[Format, list[Path]] = {}
    for one, path in where.items():
        try:
            written[one] = writers[one](path, written.get(Format.PNG, []))
        except MissingExtraError as error:
            if explicit:
                raise
            terminal(stderr=True).print(plain(str(error)), soft_wrap=True)
    return written


def print_paths(written: Mapping[Format, Sequence[Path]]) -> None:
    """Print the paths of the written files."""
    for one, paths in written.items():
        label = "  Report: " if one is Format.HTML else "  Written: "
        for path in paths:
            terminal().print(Text.assemble((label, "bold"), plain(str(path))), soft_wrap=True)


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
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; "
            "make the directory writable or name another file"
        ) from error
    return path
