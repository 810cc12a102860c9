"""``rankscope numerics``: effects of the order of a sum on gradients, and on a training."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.output import JsonOption, plain, print_json, show, table, terminal
from rankscope.errors import MissingExtraError, RunError, UsageError
from rankscope.files import replace
from rankscope.lab.numerics import Progress
from rankscope.lab.numerics.gradients import GradientKind, read, save, synthetic
from rankscope.lab.numerics.spread import SumOptions, measure, usual_workers
from rankscope.lab.numerics.spread import types as types_in_words
from rankscope.lab.numerics.summation import TYPES
from rankscope.report import needs_extra

DEFAULT_WORKERS = ",".join(map(str, SumOptions().workers))
DEFAULT_TRAINING_STEPS = 10  # of the trainings that a run on the built-in model compares

RESULT_FILE = "numerics.json"

MAX_LAYERS = 12  # layers that are shown; those with the largest errors

Values = dict[str, Any]


def numerics(
    gradients: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .npz or .npy file of local gradients, one row for each worker.",
            show_default="gradients of the built-in model",
        ),
    ] = None,
    kind: Annotated[
        GradientKind | None,
        typer.Option("--synthetic", help="Made-up gradients instead."),
    ] = None,
    at_step: Annotated[
        int,
        typer.Option(metavar="N", help="The built-in model's gradients after so many steps."),
    ] = 0,
    workers: Annotated[
        str, typer.Option(metavar="N,N,...", help="World sizes, separated by commas.")
    ] = DEFAULT_WORKERS,
    orders: Annotated[
        int, typer.Option(metavar="N", help="Orders to try; all there are up to 5 workers.")
    ] = SumOptions().orders,
    types: Annotated[
        str,
        typer.Option(
            metavar="TYPE,TYPE,...",
            help="Types of the gradients in the buffer, separated by commas.",
        ),
    ] = ",".join(TYPES),
    training_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Also compare trainings of so many steps that differ in rounding alone; 0: none.",
            show_default=f"{DEFAULT_TRAINING_STEPS} with the built-in model, else 0",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of everything.")] = 0,
    save_file: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Save the gradients to this .npz file."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help=f"Write {RESULT_FILE}, figures and a page to this directory."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how much sums of gradients depend on order, type and world size.

    The same local gradients are added up one after the other, around a ring, in a tree, by
    recursive halving and in order of arrival, in 32 and in 16 bits, and held against float64.
    docs/numerics.md explains the numbers.

    Exit code: 0; 2 bad usage or input.
    """
    names = tuple(dict.fromkeys(word.strip() for word in types.split(",") if word.strip()))
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must be between 0 and {2**31 - 1}, got {seed}")
    options = SumOptions(workers=_world_sizes(workers), orders=orders, types=names, seed=seed)
    _check(gradients, kind, at_step, save_file)
    steps = _training_steps(training_steps, builtin=gradients is None and kind is None)
    with _progress(enabled=not as_json) as report:
        if gradients is not None:
            local = read(gradients)
        elif kind is not None:
            local = synthetic(kind, options.workers[-1], seed=seed)
        else:
            from rankscope.lab.study.rounding import record_gradients

            local = record_gradients(
                options.workers[-1], step=at_step, seed=options.seed, progress=report
            )
        if save_file is not None:
            save(local, save_file)
        sums = measure(local, options, report)
        growth = None
        if steps:
            from rankscope.lab.study.rounding import run_growth
            from rankscope.lab.study.rounding_result import GrowthOptions

            growth = run_growth(GrowthOptions(steps=steps, seed=seed), report)
    grown = None if growth is None else growth.to_json()
    result = {"sums": sums, "growth": grown}
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    lines: list[Text] = []
    try:
        if output is not None:
            lines = _write(output, text, sums, grown)
    finally:  # what was measured is shown, too, when it cannot be written
        if as_json:
            print_json(result)
        else:
            render_sums(sums, [] if growth is None else growth.sentences(), terminal())
    for line in lines:
        terminal(stderr=as_json).print(line, soft_wrap=True)


def _check(
    gradients: Path | None, kind: GradientKind | None, at_step: int, save_file: Path | None
) -> None:
    if gradients is not None and kind is not None:
        raise UsageError("--gradients reads a file and --synthetic makes them up; give one of them")
    if at_step and (gradients is not None or kind is not None):
        raise UsageError("--at-step is a step of the built-in model; leave it out with other ones")
    if save_file is not None and gradients is not None:
        raise UsageError("--save with --gradients would copy the file; leave one of them out")
    if save_file is not None and save_file.suffix != ".npz":
        raise UsageError(f"--save writes a .npz file, got {save_file}; end the name in .npz")


def _training_steps(given: int | None, *, builtin: bool) -> int:
    if given is None:
        return DEFAULT_TRAINING_STEPS if builtin else 0
    if given < 0:
        raise UsageError(f"--training-steps expected 0 or more, got {given}")
    return given


def _world_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise UsageError(
            f"--workers expected whole numbers separated by commas, such as 2,4,8, got {text!r}"
        ) from None


def _write(directory: Path, text: str, sums: dict[str, Any], growth: Any) -> list[Text]:
    """Write the result, and the page where its packages are installed; return their places."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace(directory / RESULT_FILE, f"{text}\n".encode())
    except (OSError, RunError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--output {directory} cannot be written ({reason}): give a directory that can"
        ) from error
    lines = [plain(f"  Numbers: {directory / RESULT_FILE}")]
    try:
        with needs_extra("numerics.html", "web"):
            from rankscope.lab.numerics.page import write_page
        lines.append(plain(f"  Page:    {write_page(directory, sums, growth)}"))
    except MissingExtraError as error:
        lines.append(Text(str(error)))
    return lines


@contextmanager
def _progress(*, enabled: bool) -> Iterator[Progress]:
    """Show the present part while it is computed, in a terminal only."""
    console = terminal(stderr=True)
    with bars.Progress(
        bars.TextColumn("  {task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
    ) as progress:
        task = progress.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield report


def render_sums(sums: Values, more: Sequence[str], console: Console) -> None:
    """Print the JSON form of measured sums, and sentences about trainings below."""
    source = sums["source"]
    console.print()
    show(
        console,
        Text.assemble(
            ("Sums of gradients", "bold"),
            plain(
                f"  {source['name']}, {source['num_gradients']} workers, "
                f"{source['num_elements']:,} elements each"
            ),
        ),
    )
    numbers = [world["workers"] for world in sums["worlds"]]
    workers = usual_workers(sums)
    first = sums["cells"][0]["inputs"]
    _titled(console, "Two orders of a ring differ by", _by_world(sums, "difference_relative"))
    _titled(console, "Error, and below it what rounding predicts", _by_world(sums, None))
    _titled(console, f"{workers} workers in {first}", _by_scheme(sums, workers, first))
    _titled(console, f"Error by layer, {numbers[-1]} workers in a ring", _by_layer(sums))
    console.print()
    for sentence in [*sums["sentences"], *sums["notes"]]:
        show(console, _led(sentence))
    if more:
        console.print()
        show(console, Text("Trainings that differ in rounding alone", style="bold"))
        for sentence in more:
            show(console, _led(sentence))
    console.print()


def _titled(console: Console, title: str, grid: Grid) -> None:
    console.print()
    show(console, Text(title, style="bold"))
    show(console, grid)


def _led(sentence: str) -> Text:
    """Return a sentence whose question or subject, up to a colon, stands out."""
    lead, colon, rest = sentence.partition(": ")
    return Text.assemble(plain(lead + colon, "bold"), plain(rest)) if colon else plain(sentence)


def _two_lines(cell: Values) -> str:
    return types_in_words(cell).replace(" added in ", "\nin ")


def _by_world(sums: Values, column: str | None) -> Grid:
    """Return one row for each world size and one column for each combination of types."""
    cells = [cell for cell in sums["cells"] if cell["algorithm"] == "ring"]
    numbers = [world["workers"] for world in sums["worlds"]]
    heads = [_two_lines(cell) for cell in cells if cell["workers"] == numbers[0]]
    grid = table("workers", *heads, right=heads)
    for workers in numbers:
        own = [cell for cell in cells if cell["workers"] == workers]
        shown = [
            f"{_relative(cell['error_relative'])}\n({_relative(cell['predicted_relative'])})"
            if column is None
            else _relative(cell[column])
            for cell in own
        ]
        grid.add_row(str(workers), *shown)
    return grid


def _by_scheme(sums: Values, workers: int, inputs: str) -> Grid:
    heads = (
        "orders",
        "different\nresults",
        "elements\ndiffer",
        "half\nbelow,\nULP",
        "99 %\nbelow,\nULP",
        "error",
        "at worst",
    )
    grid = table("algorithm", *heads, right=heads)
    for cell in sums["cells"]:
        if cell["workers"] == workers and cell["inputs"] == cell["sums"] == inputs:
            grid.add_row(
                cell["algorithm"],
                f"{'all ' if cell['all_orders'] else ''}{cell['num_orders']}",
                str(cell["distinct_results"]),
                f"{100 * cell['share_differing']:.1f} %",
                *(
                    "–" if value is None else f"{value:,.0f}"
                    for value in (cell["spread_ulp"]["median"], cell["spread_ulp"]["p99"])
                ),
                _relative(cell["error_relative"]),
                _relative(cell["bound_relative"]),
            )
    return grid


def _by_layer(sums: Values) -> Grid:
    rows: dict[str, list[Values]] = {}
    for row in sums["layers"]:
        if row["algorithm"] == "ring":
            rows.setdefault(row["layer"], []).append(row)
    worst = sorted(rows, key=lambda name: -(rows[name][0]["error_relative"] or 0.0))[:MAX_LAYERS]
    heads = [_two_lines(row) for row in next(iter(rows.values()))]
    grid = table("layer", *heads, right=heads)
    for name in rows:
        if name in worst:
            grid.add_row(plain(name), *[_relative(row["error_relative"]) for row in rows[name]])
    if len(rows) > len(worst):
        grid.add_row(Text(f"({len(rows) - len(worst)} layers with smaller errors)", style="dim"))
    return grid


def _relative(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"
