"""The ``rankscope`` command: its subcommands, and how errors are shown."""

import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from rankscope.bus.words import printable
from rankscope.cli.causes import causes
from rankscope.cli.demo import demo
from rankscope.cli.diff import diff
from rankscope.cli.doctor import doctor
from rankscope.cli.numerics import numerics
from rankscope.cli.output import guarded_streams, terminal
from rankscope.cli.parity import parity
from rankscope.cli.replay import replay
from rankscope.cli.report import report
from rankscope.cli.run import run_script
from rankscope.cli.serve import serve
from rankscope.cli.study import study
from rankscope.cli.verify import verify
from rankscope.errors import RankscopeError, UsageError
from rankscope.version import __version__

FINDINGS = 1
BAD_INPUT = 2
FAILED = 3
DEFECT = 70
INTERRUPTED = 130

NAME = "rankscope"

ON_ALL_RANKS = ("study", "run", "doctor", "replay")  # that a launcher starts on every rank

OF_DIRECTORIES = ("report", "serve", "verify", "replay", "diff")  # "" would be the current one

PATIENCE = 5.0  # seconds that the other ranks leave rank 0 to show an error in the command line

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Variables that torchrun sets for each process, and launchers like it; ``RANK`` alone is none."""

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which other launchers put the rank of a process."""

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than_equal": "a number of at most {le:g}",
}
"""What an option wanted, by the kind of its parser's complaint."""

_CommandLineError: Any = typer.BadParameter.__mro__[1]
"""The error of a command line that cannot be read, from the copy of click that typer uses."""

app = typer.Typer(
    name=NAME,
    help="See every worker of a data-parallel training job before all-reduce averages it away.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Train a small model twice, healthy and with a fault.")(demo)
app.command(short_help="Repeat the paper's experiment on your data or built-in data.")(study)
app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    short_help="Watch an unmodified training script.",
)(run_script)
app.command(short_help="Show the verdict of a run or a study; write its page.")(report)
app.command(short_help="Explain a finding, and what to do about it.")(causes)
app.command()(serve)
app.command(short_help="Check that a training can start: ranks, network, model, data.")(doctor)
app.command(short_help="Run the batches again that a finding has saved.")(replay)
app.command(short_help="Check whether a reference step found the right gradient.")(verify)
app.command(short_help="Find where two runs part, by how much, and why.")(diff)
app.command(short_help="Check that two layouts of a training train the same.")(parity)
app.command(short_help="Measure what the order and the type of a sum change.")(numerics)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rankscope {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """See every worker of a data-parallel training job before all-reduce averages it away."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run() -> None:
    """Run the command line; rankscope's own errors become one line and an exit code."""
    with guarded_streams(_print_error) as out:
        try:
            code = _run()
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        out.flush()
        if out.failed and code in (0, FINDINGS):
            code = BAD_INPUT  # no reader has got the verdict that belongs to the code
    sys.exit(code)


def _run() -> int:
    try:
        if sys.argv[1:2] and sys.argv[1] in OF_DIRECTORIES and "" in sys.argv[2:]:
            raise UsageError(f"{sys.argv[1]} got an empty argument: is a shell variable not set?")
        code: int = app(standalone_mode=False, prog_name=NAME) or 0
        return code
    except RankscopeError as error:
        _print_error(str(error))
        return _exit_code(error)
    except MemoryError as error:
        _print_error(
            f"there is not enough memory ({error or 'no more is given'}): give the command more"
        )
        return BAD_INPUT
    except _CommandLineError as error:
        command = error.ctx.command_path if error.ctx else NAME
        if _rank_0_shows_it(command, os.environ):
            time.sleep(PATIENCE)  # a launcher that sees one rank fail ends the others
        else:
            words = _bad_usage(error)
            _print_error(f"{words}{' See' if words.endswith('?') else '; see'} {command} --help")
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort, typer.Exit):
        raise
    except Exception as error:
        _print_error(_defect(error))
        return DEFECT


def _bad_usage(error: Any) -> str:
    """Return what was expected and what came, in words of ours where typer quotes its parser."""
    if isinstance(error.__cause__, RankscopeError):
        return str(error.__cause__)
    words: str = error.format_message().rstrip(".").replace(". Did you", "; did you")
    parsed = getattr(error.__cause__, "errors", None)
    if parsed is None:
        return words
    first = parsed()[0]
    words = words.replace("Value error, ", "")
    wanted = _EXPECTED.get(first["type"])
    if wanted is None:
        return words
    option = words.partition(":")[0].removeprefix("Invalid value for ").strip("'")
    return f"{option} expected {wanted.format(**first.get('ctx', {}))}, got {first['input']!r}"


def _defect(error: Exception) -> str:
    """Return where rankscope itself has failed: code 1 would mean findings."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "rankscope" in Path(frame.filename).parts]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own or frames)[-3:]]
    return (
        f"this is a defect of rankscope {__version__}, not of your input or training: "
        f"{type(error).__name__}: {str(error)[:300]} (at {', '.join(places)}); please report it"
    )


def _rank_0_shows_it(command: str, environment: Mapping[str, str]) -> bool:
    """Return whether rank 0 of a launched job has the same command line, and shows the error."""
    if command.split()[1:] not in ([name] for name in ON_ALL_RANKS):
        return False
    if all(name in environment for name in LAUNCHED):
        return environment["RANK"] != "0"
    return next((environment[name] for name in RANKS if name in environment), "0") != "0"


def _print_error(message: str) -> None:
    line = Text.assemble(("rankscope: ", "bold red"), " ".join(printable(message).split()))
    terminal(stderr=True).print(line, soft_wrap=True)


def _exit_code(error: RankscopeError) -> int:
    name = type(error).__name__
    return {"StudyInterrupted": INTERRUPTED, "WorkerFailedError": FAILED}.get(name, BAD_INPUT)
