"""The tables and sentences of ``rankscope numerics`` in the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.paper import plain, show
from rankscope.numerics.words import USUAL_WORKERS, types

MAX_LAYERS = 12
"""Layers that are shown; those with the largest errors."""

Values = Mapping[str, Any]


def render_sums(sums: Values, more: Sequence[str], console: Console) -> None:
    """Print measured sums.

    Args:
        sums: Their JSON form.
        more: Sentences about trainings, printed below.
        console: Where to.
    """
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
    workers = USUAL_WORKERS if USUAL_WORKERS in numbers else numbers[-1]
    first = sums["cells"][0]["inputs"]
    _titled(console, "Two orders of a ring differ by", _by_world(sums, "difference_relative"))
    _titled(console, "Error, and in brackets what rounding predicts", _by_world(sums, None))
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


def _grid(*heads: str) -> Grid:
    grid = Grid(box=None, pad_edge=False, header_style="dim")
    for index, head in enumerate(heads):
        grid.add_column(head, justify="left" if index == 0 else "right")
    return grid


def _head(cell: Values) -> str:
    return types(cell).replace(" added in ", "\nin ")


def _ring(rows: Sequence[Values]) -> list[Values]:
    return [row for row in rows if row["algorithm"] == "ring"]


def _by_world(sums: Values, column: str | None) -> Grid:
    """Return one row for each world size and one column for each combination of types."""
    cells = _ring(sums["cells"])
    numbers = [world["workers"] for world in sums["worlds"]]
    grid = _grid("workers", *[_head(c) for c in cells if c["workers"] == numbers[0]])
    for workers in numbers:
        own = [cell for cell in cells if cell["workers"] == workers]
        shown = [_error(cell) if column is None else _relative(cell[column]) for cell in own]
        grid.add_row(str(workers), *shown)
    return grid


def _by_scheme(sums: Values, workers: int, inputs: str) -> Grid:
    grid = _grid(
        "algorithm",
        "orders",
        "different\nresults",
        "elements\nthat differ",
        "ULP apart,\nhalf below",
        "ULP apart,\n99 % below",
        "error",
        "at worst",
    )
    for cell in sums["cells"]:
        if cell["workers"] == workers and cell["inputs"] == cell["sums"] == inputs:
            grid.add_row(
                cell["algorithm"],
                f"{'all ' if cell['all_orders'] else ''}{cell['num_orders']}",
                str(cell["distinct_results"]),
                f"{100 * cell['share_differing']:.1f} %",
                _ulp(cell["spread_ulp"]["median"]),
                _ulp(cell["spread_ulp"]["p99"]),
                _relative(cell["error_relative"]),
                _relative(cell["bound_relative"]),
            )
    return grid


def _by_layer(sums: Values) -> Grid:
    rows: dict[str, list[Values]] = {}
    for row in _ring(sums["layers"]):
        rows.setdefault(row["layer"], []).append(row)
    worst = sorted(rows, key=lambda name: -(rows[name][0]["error_relative"] or 0.0))[:MAX_LAYERS]
    heads = [_head(row) for row in next(iter(rows.values()))]
    grid = _grid("layer", *heads)
    for name in rows:
        if name in worst:
            grid.add_row(plain(name), *[_relative(row["error_relative"]) for row in rows[name]])
    if len(rows) > len(worst):
        grid.add_row(Text(f"({len(rows) - len(worst)} layers with smaller errors)", style="dim"))
    return grid


def _error(row: Values) -> str:
    return f"{_relative(row['error_relative'])} ({_relative(row['predicted_relative'])})"


def _relative(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"


def _ulp(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
