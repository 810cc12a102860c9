"""``rankscope numerics``: what the order of a sum does to gradients, and to a training."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rankscope.cli.numerics_tables import render_sums
from rankscope.cli.output import terminal
from rankscope.cli.paper import plain
from rankscope.errors import MissingExtraError, UsageError
from rankscope.numerics.gradients import Kind, LocalGradients, read, save, synthetic
from rankscope.numerics.spread import SumOptions, measure
from rankscope.numerics.summation import TYPES
from rankscope.web import write_numerics_page

DEFAULT_WORKERS = ",".join(map(str, SumOptions().workers))
DEFAULT_TRAINING_STEPS = 10
"""Steps of the trainings that a run on the built-in model compares unless told otherwise."""

RESULT_FILE = "numerics.json"

Tell = Callable[[str, int, int], None]


def numerics(
    gradients: Annotated[
        Path | None,
        typer.Option(
            help="A .npz or .npy file of local gradients, one row for each worker.",
            show_default="gradients of the built-in model",
        ),
    ] = None,
    kind: Annotated[
        Kind | None,
        typer.Option("--synthetic", help="Made-up gradients instead.", show_default=False),
    ] = None,
    at_step: Annotated[
        int, typer.Option("--at-step", help="The built-in model's gradients after so many steps.")
    ] = 0,
    workers: Annotated[
        str, typer.Option(help="World sizes, separated by commas.")
    ] = DEFAULT_WORKERS,
    orders: Annotated[
        int, typer.Option(help="Orders to try; all there are up to 5 workers.")
    ] = SumOptions().orders,
    types: Annotated[
        str, typer.Option(help="Types of the gradients in the buffer, separated by commas.")
    ] = ",".join(TYPES),
    training_steps: Annotated[
        int | None,
        typer.Option(
            help="Also compare trainings of so many steps that differ in rounding alone; 0: none.",
            show_default=f"{DEFAULT_TRAINING_STEPS} with the built-in model, else 0",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    save_file: Annotated[
        Path | None,
        typer.Option("--save", help="Save the gradients to this .npz file.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help=f"Write {RESULT_FILE}, figures and a page to this directory.", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON instead of tables.")
    ] = False,
) -> None:
    """Measure how much sums of gradients depend on order, type and world size.

    The same local gradients are added up one after the other, around a ring, in a tree, by
    recursive halving and in order of arrival, in 32 and in 16 bits, and held against float64.
    docs/numerics.md explains the numbers.

    Exit code: 0; 2 bad usage or input.
    """
    options = SumOptions(
        workers=_numbers(workers), orders=orders, types=_names(types), seed=_seed(seed)
    )
    _check(gradients, kind, at_step, save_file)
    steps = _training_steps(training_steps, builtin=gradients is None and kind is None)
    with _progress(enabled=not as_json) as tell:
        if gradients is not None:
            local = read(gradients)
        elif kind is not None:
            local = synthetic(kind, options.workers[-1], seed=seed)
        else:
            local = _record(options, at_step, tell)
        if save_file is not None:
            save(local, save_file)
        sums = measure(local, options, tell).to_json()
        growth = _grow(steps, seed, tell) if steps else None
    grown = None if growth is None else growth.to_json()
    result = {"sums": sums, "growth": grown}
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    lines: list[Text] = []
    try:
        if output is not None:
            lines = _write(output, text, sums, grown)
    finally:  # what was measured is shown, too, when it cannot be written
        if as_json:
            print(json.dumps(result, indent=2, allow_nan=False))  # in signs that any terminal has
        else:
            render_sums(sums, [] if growth is None else growth.sentences(), terminal())
    for line in lines:
        terminal(stderr=as_json).print(line, soft_wrap=True)


def _record(options: SumOptions, at_step: int, tell: Tell) -> LocalGradients:
    from rankscope.study.local_gradients import record_gradients

    return record_gradients(options.workers[-1], step=at_step, seed=options.seed, progress=tell)


def _grow(steps: int, seed: int, tell: Tell) -> Any:
    from rankscope.study.rounding import run_growth
    from rankscope.study.rounding_result import GrowthOptions

    return run_growth(GrowthOptions(steps=steps, seed=seed), tell)


def _check(gradients: Path | None, kind: Kind | None, at_step: int, save_file: Path | None) -> None:
    if gradients is not None and kind is not None:
        raise UsageError("--gradients reads a file and --synthetic makes them up; give one of them")
    if at_step and (gradients is not None or kind is not None):
        raise UsageError("--at-step is a step of the built-in model; leave it out with other ones")
    if save_file is not None and gradients is not None:
        raise UsageError("--save with --gradients would copy the file; leave one of them out")
    if save_file is not None and save_file.suffix != ".npz":
        raise UsageError(f"--save writes a .npz file, got {save_file}; end the name in .npz")


def _training_steps(asked: int | None, *, builtin: bool) -> int:
    if asked is None:
        return DEFAULT_TRAINING_STEPS if builtin else 0
    if asked < 0:
        raise UsageError(f"--training-steps expected 0 or more, got {asked}")
    return asked


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must be between 0 and {2**31 - 1}, got {seed}")
    return seed


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise UsageError(
            f"--workers expected whole numbers separated by commas, such as 2,4,8, got {text!r}"
        ) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _write(directory: Path, text: str, sums: dict[str, Any], growth: Any) -> list[Text]:
    """Write the result, and the page where the packages for it are installed; say where.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RESULT_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--output {directory} cannot be written ({error.strerror}): give a directory that can"
        ) from error
    lines = [plain(f"  Numbers: {directory / RESULT_FILE}")]
    try:
        lines.append(plain(f"  Page:    {write_numerics_page(directory, sums, growth)}"))
    except MissingExtraError as error:
        lines.append(Text(str(error)))
    return lines


@contextmanager
def _progress(*, enabled: bool) -> Iterator[Tell]:
    """Show what is being done while it is, in a terminal only."""
    columns: Sequence[Any] = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
    console = terminal(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not (enabled and console.is_terminal)
    ) as progress:
        task = progress.add_task("starting", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield tell
