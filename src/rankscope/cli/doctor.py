"""``rankscope doctor``: a preflight under torchrun, before the training starts."""

import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rankscope.bus.words import count
from rankscope.cli.output import JsonOption, function_option, plain, print_json, show, terminal
from rankscope.files import to_plain

if TYPE_CHECKING:
    from rankscope.tools.doctor import CheckResult


class DoctorFailOn(StrEnum):
    """The results that can turn the exit code to 1."""

    WARNING = "warning"
    ERROR = "error"


def doctor(
    model: Annotated[
        str | None,
        function_option("MODULE:FUNCTION that returns the module, or (module, optimizer)."),
    ] = None,
    optimizer: Annotated[
        str | None,
        function_option("MODULE:FUNCTION that takes the module and returns its optimizer."),
    ] = None,
    loader: Annotated[
        str | None,
        function_option(
            "MODULE:FUNCTION that returns the rank's data loader, or any iterable of batches."
        ),
    ] = None,
    batches: Annotated[
        int, typer.Option(metavar="N", help="Batches that each rank reads at most.")
    ] = 200,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long a rank may take for one check before it is named."
        ),
    ] = 20.0,
    as_json: JsonOption = False,
    fail_on: Annotated[
        DoctorFailOn,
        typer.Option(help="The mildest result that makes the exit code 1."),
    ] = DoctorFailOn.ERROR,
) -> None:
    """Check in seconds that a training can start: ranks, network, model and data.

    Start it as the training is started: torchrun --nproc-per-node 8 -m rankscope doctor. The
    functions are those of the training script; each rank calls them without arguments, inside a
    process group. Rank 0 alone prints.

    Exit code: 0 ready, or nothing as severe as --fail-on; 1 a check at or above it; 2 bad usage.
    """
    from rankscope.tools.doctor import Options, Status, run_preflight, worst

    began = time.monotonic()

    def report(results: Sequence["CheckResult"]) -> int:
        taken = time.monotonic() - began
        status = worst(results)
        if as_json:
            print_json(to_document(results, status, taken))
        else:
            render_checkup(results, status, taken, terminal())
        sys.stdout.flush()
        return int(status.level >= Status(fail_on.value).level)

    options = Options(model, optimizer, loader, batches, seconds)
    code = run_preflight(options, report)
    if code:
        raise typer.Exit(code)


_LOOK = {
    "ok": ("✓", "bold green"),
    "note": ("–", "bold blue"),
    "warning": ("!", "bold yellow"),
    "error": ("✗", "bold red"),
    "skipped": ("·", "bold dim"),
}
_WORTH_ADVICE = ("error", "warning", "note")


def render_checkup(
    results: Sequence["CheckResult"], status: str, seconds: float, console: Console
) -> None:
    """Print all results, advice for those that are not well, and the verdict."""
    console.print()
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=1)
    grid.add_column(no_wrap=console.width >= 72)
    grid.add_column()
    for result in results:
        dim = "dim" if result.status == "skipped" else ""
        mark = Text(*_LOOK[result.status])
        grid.add_row(mark, plain(result.title, dim), plain(result.found, dim))
    show(console, grid)
    troubled = [
        result
        for severity in _WORTH_ADVICE
        for result in results
        if result.status == severity and result.advice
    ]
    if troubled:
        console.print()
        show(console, Text("What to do", style="bold underline"))
    for result in troubled:
        sign, look = _LOOK[result.status]
        title = plain(f"{result.title}: ", "bold")
        show(console, Text.assemble((f"{sign} ", look), title, plain(result.advice)))
    console.print()
    sign, look = _LOOK[status]
    verdict = plain(verdict_in_words(results, status), "bold")
    taken = (f"\nChecked in {seconds:.1f} s", "dim")
    show(console, Text.assemble((f"{sign} ", look), verdict, taken))
    console.print()


def to_document(results: Sequence["CheckResult"], status: str, seconds: float) -> dict[str, Any]:
    """Return the preflight as one JSON document."""
    document: dict[str, Any] = to_plain(
        {
            "kind": "doctor",
            "status": status,
            "verdict": verdict_in_words(results, status),
            "seconds": seconds,
            "checks": [result.to_json() for result in results],
        }
    )
    return document


def verdict_in_words(results: Sequence["CheckResult"], status: str) -> str:
    """Return the verdict in a sentence; ``status`` is the gravest of the results."""
    titles = [result.title for result in results if result.status == status]
    listed = ", ".join(title[0].lower() + title[1:] for title in titles)
    if status == "error":
        return f"Not ready: {count(len(titles), 'check')} failed ({listed})."
    if status == "warning":
        return f"Can start, but look at {count(len(titles), 'warning')} first ({listed})."
    done = sum(result.status != "skipped" for result in results)
    notes = sum(result.status == "note" for result in results)
    noted = f", with {count(notes, 'note')}" if notes else ""
    left = len(results) - done
    skipped = f"; {left} skipped" if left else ""
    return f"Ready: {count(done, 'check')} made, nothing wrong{noted}{skipped}."
