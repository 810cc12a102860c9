"""``rankscope doctor``: a preflight under torchrun, before the training starts."""

import json
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.cli.output import terminal

if TYPE_CHECKING:
    from rankscope.doctor import CheckResult


class DoctorFailOn(StrEnum):
    """The results that can turn the exit code to 1."""

    WARNING = "warning"
    ERROR = "error"


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="MODULE:FUNCTION that returns the module, or (module, optimizer).",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="MODULE:FUNCTION that takes the module and returns its optimizer.",
            show_default=False,
        ),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="MODULE:FUNCTION that returns the rank's data loader, or any iterable of batches.",
            show_default=False,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of the table.")
    ] = False,
    fail_on: Annotated[
        DoctorFailOn,
        typer.Option("--fail-on", help="The mildest result that makes the exit code 1."),
    ] = DoctorFailOn.ERROR,
) -> None:
    """Check in seconds that a training can start: ranks, network, model and data.

    Start it as the training is started: torchrun --nproc-per-node 8 -m rankscope doctor. The
    functions are those of the training script; each rank calls them without arguments, inside a
    process group. Rank 0 alone prints.

    Exit code: 0 ready, or nothing as severe as --fail-on; 1 a check at or above it; 2 bad usage.
    """
    from rankscope.cli.checkup import render_checkup, to_document
    from rankscope.doctor import Options, Status, run_preflight, worst

    began = time.monotonic()

    def report(results: Sequence["CheckResult"]) -> int:
        taken = time.monotonic() - began
        if as_json:
            json.dump(to_document(results, taken), sys.stdout, indent=2, allow_nan=False)
            sys.stdout.write("\n")
        else:
            render_checkup(results, taken, terminal())
        sys.stdout.flush()
        return int(worst(results).level >= Status(fail_on.value).level)

    options = Options(model, optimizer, loader, batches, seconds)
    code = run_preflight(options, report)
    if code:
        raise typer.Exit(code)
