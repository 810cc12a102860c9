"""``rankscope report``: the verdict of a run or a study, and its page."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rankscope.cli.verdict import render_differences, render_run, render_study
from rankscope.core.finding import Finding, Severity
from rankscope.diagnose.assessment import assess
from rankscope.diagnose.causes import explained_by, ranked
from rankscope.diagnose.diagnosis import diagnose_run
from rankscope.diagnose.rules import page_of
from rankscope.errors import MissingExtraError, RunError, UsageError
from rankscope.record import Run
from rankscope.record.files import to_plain
from rankscope.web import write_report, write_study_report
from rankscope.web.study_words import headline_of, is_study, open_study
from rankscope.web.words import missing


class FailOn(StrEnum):
    """The severities that can turn the exit code to 1."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


def report(
    path: Annotated[
        Path, typer.Argument(help="A run's directory, or a study's.", show_default=False)
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON instead of the verdict.")
    ] = False,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="The least severity that makes the exit code 1.")
    ] = FailOn.ERROR,
    html: Annotated[
        bool, typer.Option("--html/--no-html", help="Whether to write the page.")
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="The page's file.", show_default="report.html in that directory"
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Diagnose the run's tables again, and say where that differs from findings.jsonl.",
        ),
    ] = False,
) -> None:
    """Show the verdict of a run or a study, and write its page.

    The page is one file that opens offline. Exit code: 0 healthy, or nothing as severe as
    --fail-on; 1 findings at or above it; 2 bad usage or input.
    """
    if is_study(path):
        if again:
            raise UsageError(f"--again takes a run, and {path} is a study: name one of its runs")
        severity = _report_study(path, as_json=as_json, html=html, output=output)
    else:
        severity = _report_run(path, as_json=as_json, html=html, output=output, again=again)
    if severity is not None and severity >= Severity[fail_on.name]:
        raise typer.Exit(1)


def _report_run(
    path: Path, *, as_json: bool, html: bool, output: Path | None, again: bool
) -> Severity | None:
    if (path / "study.json").is_file():
        raise RunError(
            f"the study in {path} has no summary.json yet: wait until it has finished, continue "
            f"it with rankscope study --resume, or report one of the runs in {path / 'runs'}"
        )
    run = Run.open(path)
    differences: list[str] | None = None
    if again:
        diagnosed = diagnose_run(run)
        differences = _differences(run.findings(), diagnosed)
        run = run.with_findings(diagnosed)
    assessment = assess(run)
    found = run.findings()
    severities = [finding.severity for finding in found]
    if assessment.severity is not None:
        severities.append(assessment.severity)
    if not as_json:
        render_run(run, assessment, Console())
        if differences is not None:
            render_differences(differences, run.status, Console())
    page = _page(lambda: write_report(run, output)) if html else None
    if as_json:
        _print_json(
            {
                "kind": "run",
                "path": str(path),
                "status": run.status,
                "severity": _name(assessment.severity),
                "headline": assessment.headline,
                "statements": list(assessment.statements),
                "recommendation": assessment.recommendation,
                "values": assessment.values,
                "findings": [_with_context(finding, found) for finding in ranked(found)],
                **({} if differences is None else {"differences": differences}),
                "report": page and str(page),
            }
        )
    else:
        _say_where(page)
    return max(severities, default=None)


def _with_context(finding: Finding, found: Sequence[Finding]) -> dict[str, Any]:
    """Return a finding with the one that explains it, if any, and its page of the documentation."""
    cause = explained_by(finding, found)
    return {
        **finding.to_json(),
        "consequence_of": None if cause is None else cause.id,
        "page": page_of(finding.id, finding.cause),
    }


def _differences(recorded: Iterable[Finding], again: Iterable[Finding]) -> list[str]:
    """Say for each finding how a new diagnosis differs from ``findings.jsonl``."""
    before, after = ({one.id: _comparable(one) for one in found} for found in (recorded, again))
    told = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            told.append(f"{name}: only in findings.jsonl")
        elif name not in before:
            told.append(f"{name}: not in findings.jsonl")
        else:
            one, other = before[name], after[name]
            changed = [key for key in one if one[key] != other[key]]
            if changed:
                told.append(f"{name}: other {', '.join(changed).replace('_', ' ')}")
    return told


def _comparable(finding: Finding) -> dict[str, Any]:
    """Return a finding as the file holds it, without when it was written."""
    event: dict[str, Any] = to_plain(finding.to_json())
    del event["step"]
    return event


def _report_study(path: Path, *, as_json: bool, html: bool, output: Path | None) -> Severity | None:
    study = open_study(path)
    word, headline = headline_of(study.entries)
    if not as_json:
        render_study(path, Console())
    page = _page(lambda: write_study_report(path, output)) if html else None
    if as_json:
        _print_json(
            {
                "kind": "study",
                "path": str(path),
                "severity": None if word == "healthy" else word,
                "headline": headline,
                "entries": [entry.values for entry in study.entries],
                "report": page and str(page),
            }
        )
    else:
        _say_where(page)
    return None if word == "healthy" else Severity[word.upper()]


def _page(write: Callable[[], Path]) -> Path | None:
    """Write the page; without the packages it needs, say so and go on."""
    try:
        return write()
    except MissingExtraError as error:
        Console(stderr=True).print(Text(str(error)), soft_wrap=True)
        return None


def _say_where(page: Path | None) -> None:
    if page is not None:
        line = Text.assemble(("  Report: ", "bold"), str(page))
        Console().print(line, soft_wrap=True)


def _name(severity: Severity | None) -> str | None:
    return None if severity is None else str(severity)


def _print_json(result: Mapping[str, Any]) -> None:
    json.dump(_jsonable(result), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _jsonable(value: Any) -> Any:
    """Return a value with plain JSON types; undefined numbers become null."""
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if hasattr(value, "item"):
        value = value.item()
    return None if missing(value) or value in (math.inf, -math.inf) else value
