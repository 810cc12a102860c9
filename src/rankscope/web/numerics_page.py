"""The page of ``rankscope numerics``, and its figures as PNG files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from rankscope.numerics.words import size
from rankscope.web import numerics_figures as figures
from rankscope.web import numerics_growth_figures as growth_figures
from rankscope.web import numerics_sheets as sheets
from rankscope.web.document import png_of, render, spec_of, write_bytes, write_text
from rankscope.web.numerics_figures import Values
from rankscope.web.parts import Spec, Tables

PAGE = "numerics.html"


def write_page(directory: Path, sums: Values, growth: Values | None = None) -> Path:
    """Write ``numerics.html`` and its figures as ``numerics-*.png`` into a directory.

    Args:
        directory: Made if need be.
        sums: The JSON form of measured sums (see ``rankscope.numerics.spread``).
        growth: The JSON form of pairs of trainings; None when none was run.

    Returns:
        The page's path.

    Raises:
        RunError: A file cannot be written.
    """
    tables = Tables()
    specs = _sum_specs(tables, sums)
    if growth is not None:
        specs |= _growth_specs(tables, growth)
    types = figures.types_of(sums)
    context = {
        "title": "numerics",
        "lead": _lead(sums),
        "tiles": list(_tiles(sums, growth)),
        "why": [_split(sentence) for sentence in sums["sentences"]],
        "types": types,
        "type_colours": list(zip(types, range(len(types)), strict=True)),
        "layer_note": "Ticks: expected from rounding.",
        "figure_names": list(specs),
        "growth": growth is not None,
        "rows": list(_rows(growth)) if growth else [],
        "summary": growth["summary"] if growth else "",
        "facts": list(_facts(sums, growth)),
    }
    page = write_text(Path(directory) / PAGE, render("numerics.html", context, specs, tables))
    write_figures(Path(directory), sums, growth)
    return page


def write_figures(directory: Path, sums: Values, growth: Values | None = None) -> list[Path]:
    """Write ``numerics-error.png``, ``-spread``, ``-layers`` and, of trainings, ``-growth``.

    Raises:
        RunError: A file cannot be written.
    """
    tables = Tables()
    drawn: dict[str, alt.TopLevelMixin] = {
        "error": sheets.error_sheet(tables, sums),
        "spread": sheets.spread_sheet(tables, sums),
        "layers": sheets.layer_sheet(tables, sums),
    }
    if growth is not None:
        drawn["growth"] = sheets.growth_sheet(tables, growth)
    return _write(directory, drawn, tables)


def write_growth_figures(
    directory: Path, growth: Values, others: Sequence[Values], settings: Mapping[str, Values]
) -> list[Path]:
    """Write what longer experiments show: ``numerics-growth.png`` and ``numerics-settings.png``.

    Args:
        directory: Made if need be.
        growth: Pairs of trainings.
        others: The same with other seeds, drawn faintly behind.
        settings: Pairs of trainings by the name of the optimizer's setting.

    Raises:
        RunError: A file cannot be written.
    """
    tables = Tables()
    drawn: dict[str, alt.TopLevelMixin] = {
        "growth": sheets.growth_sheet(tables, growth, others),
        "settings": sheets.settings_sheet(tables, settings),
    }
    return _write(directory, drawn, tables)


def _write(directory: Path, drawn: Mapping[str, alt.TopLevelMixin], tables: Tables) -> list[Path]:
    return [
        write_bytes(directory / f"numerics-{name}.png", png_of(sheet, tables))
        for name, sheet in drawn.items()
    ]


def _sum_specs(tables: Tables, sums: Values) -> dict[str, Spec]:
    specs = {
        f"error-{name}": spec_of(figures.errors(tables, sums, name))
        for name in figures.types_of(sums)
    }
    specs["algorithms"] = spec_of(figures.algorithms(tables, sums))
    specs["layers"] = spec_of(figures.layer_errors(tables, sums))
    return specs | {name: spec_of(figures.spread(tables, sums, name)) for name in figures.SPREADS}


def _growth_specs(tables: Tables, growth: Values) -> dict[str, Spec]:
    """Return the figures that have something to show: identical trainings have nothing."""
    sizes = (("distance", 300, 1.14), ("evaluation", 240, 1.34))
    specs = {
        f"growth-{name}": spec_of(
            growth_figures.curves(tables, growth, name, height=height, room=room)
        )
        for name, height, room in sizes
        if growth_figures.growth_rows(growth, name)
    }
    if growth_figures.growth_rows(growth, "distance"):
        specs["growth-layers"] = spec_of(growth_figures.layers(tables, growth))
    return specs


def _lead(sums: Values) -> str:
    source = sums["source"]
    return (
        f"{source['num_gradients']} local gradients of {source['num_elements']:,} elements each "
        f"({source['name']}), summed on {_numbers(sums['options']['workers'])} workers with every "
        "algorithm, in many orders, and compared with float64."
    )


def _tiles(sums: Values, growth: Values | None) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and note of five numbers that say most."""
    workers = figures.usual_workers(sums)
    cells = {
        (cell["inputs"], cell["sums"]): cell
        for cell in sums["cells"]
        if cell["workers"] == workers and cell["algorithm"] == "ring"
    }
    for name in figures.types_of(sums):
        cell, wide = cells[name, name], cells[name, "float32"]
        note = f"{workers} workers, around a ring"
        if name != "float32":
            note = f"{size(wide['error_relative'])} if added in float32"
        yield f"Error in {name}", size(cell["error_relative"]), note
    widest = cells[(figures.types_of(sums)[0],) * 2]
    share, differ = size(widest["share_differing"]), size(widest["difference_relative"])
    yield "Depend on the order", share, f"of the elements; two orders differ by {differ}"
    order = _pair(growth, "order")
    if growth is not None and order is not None:
        steps = len(order["distance"])
        yield f"Apart after {steps} steps", size(order["distance"][-1]), "arrival order alone"
        return
    [world] = [world for world in sums["worlds"] if world["workers"] == workers]
    noise = size(world.get("noise_relative"))
    yield "Noise of the data", noise, "by which other samples would move the gradient"


def _rows(growth: Values) -> Iterator[list[str]]:
    """Yield the cells of the table of trainings."""
    for pair in growth["pairs"]:
        grown = pair["growth"] or {}
        first = pair["first_step"]
        changes = [abs(value) for value in pair["evaluation"] if value is not None]
        yield [
            pair["title"],
            "the same bits" if pair["identical"] else grown.get("words") or "–",
            "never" if first is None else f"{first:,}",
            "0" if first is None else size(pair["distance"][first - 1]),
            size(pair["distance"][-1]),
            size(pair["differing"][-1]),
            "–" if pair["median_ulp"][-1] is None else f"{pair['median_ulp'][-1]:,.0f}",
            f"{max(changes, default=0.0):.1e}" if any(changes) else "0",
        ]


def _facts(sums: Values, growth: Values | None) -> Iterator[tuple[str, str]]:
    source, options, reference = sums["source"], sums["options"], sums["reference"]
    yield "Gradients", f"{source['name']} ({source['kind']})"
    yield "Elements", f"{source['num_measured']:,} measured of {source['num_elements']:,}"
    yield "Orders", f"{options['orders']} per sum, or all where there are fewer"
    yield "Divided by W", f"{options['divide']} the sum"
    yield (
        "Reference",
        f"float64, {size(reference['relative'])} from exact sums of {reference['num_exact']:,} "
        "elements",
    )
    if growth is not None:
        known: Mapping[str, Any] = growth["facts"]
        options = growth["options"]
        yield "Trainings", f"{known['model']}, {known['num_parameters']:,} parameters"
        yield (
            "Steps",
            f"{options['steps']:,} on {options['workers']} workers with {options['optimizer']}, "
            f"learning rate {options['learning_rate']:g}, {known['samples_per_step']} samples each",
        )
        yield "Data", f"{known['data']}, {known['samples']:,} samples"
    for note in sums["notes"]:
        yield "Note", note


def _pair(growth: Values | None, name: str) -> Values | None:
    pairs: Sequence[Values] = growth["pairs"] if growth else []
    return next((pair for pair in pairs if pair["name"] == name), None)


def _split(sentence: str) -> tuple[str, str]:
    """Return a sentence's words before and after its first colon: a heading and a paragraph."""
    heading, colon, rest = sentence.partition(": ")
    if not colon:
        return "", sentence
    return heading, rest[:1].upper() + rest[1:]


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}" if values[1:] else str(values[0])
