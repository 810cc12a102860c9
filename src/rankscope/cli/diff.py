"""``rankscope diff``: where two runs first part, and whether rounding explains it."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.output import (
    HtmlOption,
    JsonOption,
    heading,
    labelled,
    labels,
    plain,
    points,
    print_json,
    show,
    terminal,
    verdict_head,
)
from rankscope.errors import UsageError
from rankscope.report import needs_extra

if TYPE_CHECKING:
    from rankscope.tools.diff import Comparison

MAX_TENSORS = 5  # tensors that the terminal shows

_LOOK = {
    "identical": ("=", "green"),
    "rounding": ("≈", "blue"),
    "different data": ("≠", "yellow"),
    "different state": ("≠", "yellow"),
    "different configuration": ("≠", "yellow"),
    "bug-like jump": ("◆", "red"),
}
_BARS = "▁▂▃▄▅▆▇█"


def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run's directory.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run's.")],
    as_json: JsonOption = False,
    offset: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Step of A minus step of B.",
            show_default="0, unless equal batches prove another",
        ),
    ] = None,
    html: HtmlOption = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the figure to this file."),
    ] = None,
) -> None:
    """Find where two runs first part, by how much, and whether rounding explains it.

    Steps, workers and batches are aligned first; the runs may have other numbers of workers. With
    watch(trace=True) in both, the first step and tensor are exact.

    Exit code: 0 identical; 1 not identical; 2 bad usage or input.
    """
    from rankscope.record import Run
    from rankscope.record.stores import at_hand
    from rankscope.tools.diff import compare_runs

    run_a = at_hand(run_a)
    run_b = at_hand(run_b)
    if run_a.resolve() == run_b.resolve():
        raise UsageError(f"{run_a} and {run_b} are one run: name two")
    comparison = compare_runs(Run.open(run_a), Run.open(run_b), offset=offset)
    written = []
    if html is not None:
        with needs_extra(html.name, "web"):
            from rankscope.tools.comparison_pages import write_diff_page
        written.append(str(write_diff_page(comparison, html)))
    if png is not None:
        with needs_extra(png.name, "web"):
            from rankscope.tools.comparison_pages import write_diff_figure
        written.append(str(write_diff_figure(comparison, png)))
    if as_json:
        print_json({**comparison.to_json(), "written": written})
    else:
        render_comparison(comparison, terminal())
        for path in written:
            terminal().print(labelled("  Written", path), soft_wrap=True)
    if not comparison.identical:
        raise typer.Exit(1)


def render_comparison(comparison: "Comparison", console: Console) -> None:
    """Print the verdict on two runs: the class, its evidence, and what to do."""
    console.print()
    names = f"{Path(comparison.run_a).name} · {Path(comparison.run_b).name}"
    word = str(comparison.kind).upper()
    show(console, verdict_head(_LOOK[comparison.kind], word, names, comparison.headline))
    console.print()
    show(console, labelled("What to do", comparison.advice))
    if not comparison.identical:
        heading(console, "Where they part")
        show(console, _numbers(comparison))
    heading(console, "What the comparison says")
    points(console, comparison.explanation)
    if comparison.causes:
        heading(console, "Possible causes")
        points(console, comparison.causes)
    if any((curve.values > 0).any() for curve in comparison.curves):
        heading(console, "Relative distance over the steps")
        show(console, _curves(comparison))
    console.print()
    show(console, plain(f"{comparison.alignment.words}.", "dim"))
    console.print()


def _numbers(comparison: "Comparison") -> Grid:
    parting = comparison.parting
    assert parting is not None
    rows: list[tuple[str, str]] = [("step", str(parting.step)), ("stage", str(parting.stage))]
    if parting.tensor:
        rows.append(("tensor", parting.tensor))
    if not math.isnan(parting.relative):
        rows.append(("relative distance", f"{parting.relative:.3g}"))
    if not math.isnan(parting.ulp):
        mean = " (root mean square)" if parting.num_tensors else ""
        rows.append((f"units in the last place, {parting.dtype}", f"{parting.ulp:.3g}{mean}"))
    if not math.isnan(parting.predicted):
        rows.append(("rounding predicts", f"{parting.predicted:.3g}"))
    for name, apart in list(comparison.tensors.items())[:MAX_TENSORS]:
        rows.append((f"  {name}", "not a number" if math.isnan(apart) else f"{apart:.3g}"))
    return labels(rows)


def _curves(comparison: "Comparison") -> Grid:
    """Return each curve as a line of bars, on one logarithmic scale."""
    sizes = [v for c in comparison.curves for v in c.values if v > 0 and math.isfinite(v)]
    low = math.log10(min(sizes, default=1.0))
    high = math.log10(max(sizes, default=1.0))
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    for curve in comparison.curves:
        values = _thinned(curve.values.tolist(), 48)
        bars = "".join(_bar(value, low, high) for value in values)
        known = [v for v in curve.values if not math.isnan(v)]
        last = f"{known[-1]:.2g} in the last step" if known else ""
        grid.add_row(plain(curve.name, "dim"), Text(bars), plain(last, "dim"))
    return grid


def _thinned(values: list[float], most: int) -> list[float]:
    every = -(-len(values) // most)
    parts = [values[start : start + every] for start in range(0, len(values), every)]
    return [max(part, key=lambda v: -1.0 if math.isnan(v) else v) for part in parts]


def _bar(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return " "
    if value <= 0:
        return "·"
    share = 1.0 if not math.isfinite(value) else (math.log10(value) - low) / max(high - low, 1e-9)
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
