"""``rankscope demo``: the same job twice, as it should be and with its sampler forgotten."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.output import JsonOption, labelled, plain, print_json, show, terminal
from rankscope.cli.report import run_result
from rankscope.cli.verdict import verdict_lines
from rankscope.errors import MissingExtraError, UsageError
from rankscope.record import Run
from rankscope.report import write_comparison
from rankscope.verdict.assessment import assess
from rankscope.verdict.words import run_line, verdict_of

TRAININGS = ("healthy", "forgotten-sampler")
WORKERS = 2
STEPS = 120


def demo(
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for both runs and the page.")
    ] = Path("rankscope-demo"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a demo that is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small model twice on two workers: with shards, and with the sampler forgotten.

    Both averaged losses fall alike. The verdicts and the page show the difference. It takes half
    a minute, and no network.

    Exit code: 0 when both trainings finished, whatever was found; else 2.
    """
    there = _find(output, overwrite=overwrite)
    console = terminal(stderr=as_json)
    show(console, plain(f"Training on {WORKERS} workers, twice; it takes half a minute …", "dim"))
    from rankscope.lab.study.demo import train_both

    log = output / "error.log"
    if there:
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=output) as folder:
            train_both(Path(folder), WORKERS, STEPS, log)
            for name in TRAININGS:  # what is there goes only now that there is something new
                shutil.rmtree(output / name, ignore_errors=True)
                (Path(folder) / name).rename(output / name)
    else:
        train_both(output, WORKERS, STEPS, log)
    runs = {name: Run.open(output / name) for name in TRAININGS}
    try:
        healthy, faulty = runs.values()
        page = write_comparison(healthy, faulty, output / "report.html")
        line = labelled("  Side by side", str(page))
    except MissingExtraError as error:
        line = plain(f"  {error}", "yellow")
    if as_json:
        print_json({name: run_result(run) for name, run in runs.items()})
    else:
        for run in runs.values():
            _show(run)
    console.print()
    console.print(line, soft_wrap=True)


def _find(output: Path, *, overwrite: bool) -> list[str]:
    """Return the runs of a demo that are there, and may be replaced; UsageError for others."""
    there = [name for name in TRAININGS if Run.is_run(output / name)]
    if there and not overwrite:
        raise UsageError(
            f"{output} already holds a demo: add --overwrite, or choose another --output"
        )
    if (output / "run.json").exists() or (output / "study.json").exists():
        raise UsageError(
            f"{output} holds a run or a study, whose report.html would be replaced: choose another "
            "--output"
        )
    return there


def _show(run: Run) -> None:
    assessment = assess(run)
    verdict = verdict_of(run, assessment)
    console = terminal()
    first = assessment.values["loss_first"]
    last = assessment.values["loss_last"]
    console.print()
    show(console, verdict_lines(verdict.severity, assessment.headline, verdict.title))
    if first is not None and last is not None:
        show(
            console,
            labelled(
                "Averaged loss",
                f"{first:.2f} → {last:.2f} (first and last 5 steps), {run_line(run, assessment)}",
            ),
        )
    show(console, labelled("What to do", assessment.recommendation))
