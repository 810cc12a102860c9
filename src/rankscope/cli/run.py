"""``rankscope run``: watches an unmodified training script."""

import sys
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.bus.plan import Plan, Tier
from rankscope.errors import UsageError
from rankscope.files import parse, read_file
from rankscope.record.stores import Store


class ReducedOption(StrEnum):
    """Values of --reduced."""

    OFF = "off"
    NORM = "norm"
    SKETCH = "sketch"


def run_script(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...",
            help="The training script, or a command such as torchrun, and all its arguments.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory to write.", show_default="runs/ and the script's name"
        ),
    ] = None,
    tier: Annotated[
        Tier, typer.Option(help="How much of the gradients is compared.")
    ] = Tier.SKETCH,
    every: Annotated[
        int,
        typer.Option(
            metavar="N", help="Measure gradients in steps that are multiples of this.", min=1
        ),
    ] = 1,
    groups: Annotated[
        str,
        typer.Option(
            metavar="GROUPS",
            help="Groups of parameters: blocks, none, or JSON from name prefix to group name.",
        ),
    ] = "blocks",
    reduced: Annotated[
        ReducedOption | None,
        typer.Option(
            help="What is read of the reduced gradient; by default its sketch, if there are any."
        ),
    ] = None,
    overhead_budget: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Share of the step time that rankscope may take, or none."
        ),
    ] = "0.01",
    sink: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SINK",
            help="Where the numbers go as well: tensorboard, jsonl:PATH, … Repeatable.",
        ),
    ] = None,
    alert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="Where findings go that open or get worse: slack:URL, mailto:ADDRESS, … "
            "Repeatable.",
            show_default="those in RANKSCOPE_ALERTS",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="What is meant: JSON, or a file of JSON or TOML."),
    ] = None,
    verify_at: Annotated[
        list[int] | None,
        typer.Option(
            metavar="STEP",
            help="Compute this step's gradient again, and compare it. Repeatable.",
            min=0,
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record a trace for rankscope diff (DDP).")
    ] = False,
    no_canary: Annotated[
        bool, typer.Option("--no-canary", help="Never replay a batch on all workers.")
    ] = False,
    no_announce: Annotated[
        bool, typer.Option("--no-announce", help="Print neither findings nor the verdict.")
    ] = False,
    parity: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Record N steps for rankscope parity, without the monitor, and end the training.",
            min=1,
        ),
    ] = None,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch dropout off in what --parity records.")
    ] = False,
) -> None:
    """Watch a training script as it is, without a line of rankscope in it.

    On all ranks: torchrun --nproc-per-node 8 -m rankscope run train.py --lr 3e-4, or rankscope run
    -- torchrun --nproc-per-node 8 train.py --lr 3e-4. What follows the script belongs to the
    script; so do its output, signals and exit code.

    Exit code: the script's own; 2 bad usage.
    """
    from rankscope.integrations.run_script import (
        ScriptJob,
        become,
        check_interpreter,
        command_for,
        name_of,
    )

    words = list(words or ())
    try:
        check_interpreter()
        if no_dropout and parity is None:
            raise UsageError("--no-dropout belongs to --parity N")
        if sink:
            from rankscope.sinks.specs import plan_sinks

            plan_sinks(sink)
        if alert:
            from rankscope.sinks.specs import plan_alerts

            plan_alerts(alert)
        command = command_for(words, module=module, original=sys.orig_argv)
        options: dict[str, Any] = {
            "tier": str(tier),
            "every": every,
            "groups": _groups(groups),
            "reduced": None if reduced is None else str(reduced),
            "overhead_budget": _budget(overhead_budget),
            "plan": _plan(plan),
            "trace": trace,
            "canary": not no_canary,
            "announce": not no_announce,
            **({"verify_at": verify_at} if verify_at else {}),
            **({"sinks": sink} if sink else {}),
            **({"alerts": alert} if alert else {}),
        }
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    name = name_of(words, module=module)
    directory = run_dir or Path("runs") / name
    place = Store.of(directory) or directory.absolute()
    recorded = None
    if parity is not None:
        recorded = {"steps": parity, "no_dropout": no_dropout, "compare_with": str(directory)}
    become(command, ScriptJob(str(place), name, options, parity=recorded))


def _groups(given: str) -> str | dict[str, str]:
    if given in ("blocks", "none"):
        return given
    groups = _json("--groups", given)
    if not all(isinstance(name, str) for name in groups.values()):
        raise UsageError(f"--groups expected names of groups, got {given}")
    return groups


def _budget(given: str) -> float | None:
    if given == "none":
        return None
    try:
        budget = float(given)
    except ValueError:
        budget = -1.0
    if not budget > 0:
        raise UsageError(f"--overhead-budget expected a share such as 0.01, or none, got {given}")
    return budget


def _plan(given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = read_file(Path(given)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--plan expected JSON, or a file of JSON or TOML, got {given}: {error}"
            ) from error
        if given.endswith(".toml"):
            try:
                return Plan.of(tomllib.loads(text)).to_json()
            except (tomllib.TOMLDecodeError, RecursionError) as error:
                raise UsageError(f"--plan expected TOML in {given}: {error}") from error
    return Plan.of(_json("--plan", text)).to_json()


def _json(option: str, text: str) -> dict[str, Any]:
    try:
        value = parse(text)
    except ValueError as error:
        raise UsageError(f"{option} expected a JSON object, got {text[:80]!r}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"{option} expected a JSON object, got {text[:80]!r}")
    return dict(value)
