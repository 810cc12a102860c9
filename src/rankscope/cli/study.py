"""``rankscope study``: the paper's experiment."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rankscope.cli.output import JsonOption, plain, print_json, terminal
from rankscope.cli.verdict import render_study
from rankscope.errors import MissingExtraError, UsageError
from rankscope.lab.study.config import Precision, Setting, ShardReading, StudyConfig
from rankscope.report import write_figures, write_study_report

DEFAULTS = StudyConfig()


class ReadingOption(StrEnum):
    """Values of --reading."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    BOTH = "both"


def study(
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="'builtin', a JSON or JSONL file in Alpaca's format, or a Hugging Face data set.",
        ),
    ] = DEFAULTS.data,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="'tiny', 'pangu-1b', or a Hugging Face name or directory."
        ),
    ] = DEFAULTS.model,
    weights: Annotated[
        str, typer.Option(metavar="DIR", help="Directory of published weights for pangu-1b.")
    ] = DEFAULTS.weights,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory to write; must be new.")
    ] = Path("runs/study"),
    reading: Annotated[
        ReadingOption, typer.Option(help="How workers get their samples.")
    ] = ReadingOption.BOTH,
    settings: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Seed settings, separated by commas.")
    ] = "s1-1,s1-2,s1-3",
    workers: Annotated[
        int, typer.Option(metavar="N", help="Number of workers.")
    ] = DEFAULTS.workers,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Optimizer steps per training; 64 complete all checks.")
    ] = DEFAULTS.steps,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Samples per worker and micro-batch.")
    ] = DEFAULTS.batch_size,
    accumulation: Annotated[
        int, typer.Option(metavar="N", help="Micro-batches per step.")
    ] = DEFAULTS.accumulation,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="AdamW's learning rate.", show_default="5e-4 for tiny, else 2e-5"
        ),
    ] = None,
    max_length: Annotated[
        int, typer.Option(metavar="N", help="Longest sample in tokens.")
    ] = DEFAULTS.max_length,
    precision: Annotated[
        Precision, typer.Option(help="auto: bf16 on an accelerator, fp32 on a CPU.")
    ] = DEFAULTS.precision,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="First N records of the data.", show_default="all"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of everything.")] = DEFAULTS.seed,
    save_all: Annotated[
        bool, typer.Option("--save-all", help="Save all models, not of the sharded reading alone.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted study.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove a study that is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune under the paper's seed settings and show what every worker did.

    Six trainings by default: the settings S1-1 (one seed), S1-2 (worker 0 differs) and S1-3
    (every worker differs), each with sharded and with replicated data. Starts its own workers on
    this machine; under torchrun it joins the ranks that are there.

    Exit code: 0 when all trainings finished, whatever they found; 2 bad usage or input; 3 a
    worker failed; 130 interrupted (go on with --resume).
    """
    from rankscope.lab.study.runner import run_study

    if learning_rate is not None and learning_rate <= 0:
        raise UsageError(f"--learning-rate must be positive, got {learning_rate}")
    both = reading is ReadingOption.BOTH
    readings = tuple(ShardReading) if both else (ShardReading(reading.value),)
    config = StudyConfig(
        data=data,
        model=model,
        weights=weights,
        workers=workers,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
        readings=readings,
        settings=_settings(settings),
        seed=seed,
        limit=limit,
        max_length=max_length,
        learning_rate=learning_rate or 0.0,
        precision=precision,
        save_all=save_all,
    )
    entries = run_study(config, output, resume=resume, overwrite=overwrite)
    if entries is None:
        return
    try:
        line = _write_report(output)
    finally:  # the verdict is shown, too, when the report cannot be written
        if as_json:
            print_json(entries)
        else:
            render_study(output, terminal())
    terminal(stderr=as_json).print(line, soft_wrap=True)


def _settings(text: str) -> tuple[Setting, ...]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    known = [str(setting) for setting in Setting]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(
            f"--settings expected some of {', '.join(known)}, got {text!r}; separate by commas"
        )
    return tuple(setting for setting in Setting if str(setting) in names)


def _write_report(output: Path) -> Text:
    """Write figures and page, and return their places."""
    try:
        write_figures(output)
        return plain(f"Report: {write_study_report(output)}")
    except MissingExtraError as error:
        return plain(str(error), "yellow")
