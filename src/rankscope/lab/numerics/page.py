"""The page of ``rankscope numerics``, and its figures as PNG files, several panels to a sheet."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.bus.words import listed
from rankscope.lab.numerics import figures
from rankscope.lab.numerics.figures import Values
from rankscope.lab.numerics.spread import size, usual_workers
from rankscope.report.document import png_of, render, write_bytes
from rankscope.report.parts import Spec, Tables, headed, sized, titled


def write_page(directory: Path, sums: Values, growth: Values | None = None) -> Path:
    """Write ``numerics.html`` and its figures as ``numerics-*.png`` into a directory."""
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
    page = write_bytes(
        directory / "numerics.html", render("numerics.html", context, specs, tables).encode()
    )
    sheets = {
        "error": _error_sheet(tables, sums),
        "spread": _spread_sheet(tables, sums),
        "layers": headed(
            sized(figures.layer_errors(tables, sums, height=150), 880),
            "The error layer by layer",
            "In a ring. Points: measured. Ticks: expected from rounding.",
        ),
    }
    if growth is not None:
        sheets["growth"] = growth_sheet(tables, growth)
    write_sheets(directory, sheets, tables)
    return page


def write_sheets(directory: Path, drawn: Mapping[str, Spec], tables: Tables) -> list[Path]:
    """Write figures as ``numerics-*.png``."""
    return [
        write_bytes(directory / f"numerics-{name}.png", png_of(sheet, tables))
        for name, sheet in drawn.items()
    ]


def _error_sheet(tables: Tables, sums: Values) -> Spec:
    """Return the error over world sizes, one panel for each type of buffer."""
    panels = [
        titled(
            sized(figures.errors(tables, sums, name), 310, 280),
            f"{name} buffers",
            "relative error of the reduced gradient",
        )
        for name in figures.types_of(sums)
    ]
    return headed(
        {"hconcat": panels, "spacing": 46},
        "How far a sum of gradients is from the truth",
        "Points: measured. Dashed: expected from rounding. Thin: bound. "
        "Blue: ring. Orange: tree. Green: ring, added in float32.",
    )


def _spread_sheet(tables: Tables, sums: Values) -> Spec:
    """Return how far results of different orders lie apart."""
    words = (
        ("spread-median", "Spread of an element", "median, units in the last place"),
        ("spread-p99", "The most sensitive hundredth", "99 % of elements have less, ULP"),
        ("spread-share", "Elements whose bits depend on it", "share"),
    )
    panels = [
        titled(sized(figures.spread(tables, sums, name), 310, 250), title, unit)
        for name, title, unit in words
    ]
    pairs = zip(("Blue", "Orange", "Green"), figures.types_of(sums), strict=False)
    named = ". ".join(f"{colour}: {name}" for colour, name in pairs)
    sheet = {"hconcat": panels, "spacing": 46}
    return headed(sheet, "What the order of the same sum changes", f"In a ring. {named}.")


def growth_sheet(tables: Tables, growth: Values, others: Sequence[Values] = ()) -> Spec:
    """Return how parameters part, and its effect on the held-out loss; other seeds are faint."""
    words = (
        ("distance", "Parameters", "relative distance from the first training", 330),
        ("evaluation", "Held-out loss", "difference from the first training, nats per token", 240),
    )
    panels = []
    for name, title, unit, height in words:
        curves = figures.curves(tables, growth, name, height=height, room=1.17, others=others)
        panels.append(titled(sized(curves, 1010), title, unit))
    return headed(
        {"vconcat": panels, "spacing": 34},
        "Trainings that differ in the reduction alone, beside one on other data",
        "The same model, data and seed in all but the last, which sees the samples in another "
        "order.",
    )


def _sum_specs(tables: Tables, sums: Values) -> dict[str, Spec]:
    types = figures.types_of(sums)
    specs = {f"error-{name}": figures.errors(tables, sums, name) for name in types}
    specs["algorithms"] = figures.algorithms(tables, sums)
    specs["layers"] = figures.layer_errors(tables, sums)
    return specs | {name: figures.spread(tables, sums, name) for name in figures.SPREADS}


def _growth_specs(tables: Tables, growth: Values) -> dict[str, Spec]:
    """Return the figures that have something to show: identical trainings have nothing."""
    specs = {
        f"growth-{name}": figures.curves(tables, growth, name, height=height, room=1)
        for name, height in (("distance", 300), ("evaluation", 240))
        if figures.growth_rows(growth, name)
    }
    if figures.growth_rows(growth, "distance"):
        specs["growth-layers"] = figures.layer_distances(tables, growth)
    return specs


def _lead(sums: Values) -> str:
    source = sums["source"]
    workers = [str(number) for number in sums["options"]["workers"]]
    return (
        f"{source['num_gradients']} local gradients of {source['num_elements']:,} elements each "
        f"({source['name']}), summed on {listed(workers)} workers with every "
        "algorithm, in many orders, and compared with float64."
    )


def _tiles(sums: Values, growth: Values | None) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and note of the five most informative numbers."""
    workers = usual_workers(sums)
    cells = {
        (cell["inputs"], cell["sums"]): cell
        for cell in sums["cells"]
        if cell["workers"] == workers and cell["algorithm"] == "ring"
    }
    for name in figures.types_of(sums):
        cell = cells[name, name]
        wide = cells[name, "float32"]
        note = f"{workers} workers, around a ring"
        if name != "float32":
            note = f"{size(wide['error_relative'])} if added in float32"
        yield f"Error in {name}", size(cell["error_relative"]), note
    widest = cells[(figures.types_of(sums)[0],) * 2]
    share = size(widest["share_differing"])
    differ = size(widest["difference_relative"])
    yield "Depend on the order", share, f"of the elements; two orders differ by {differ}"
    pairs: Sequence[Values] = growth["pairs"] if growth else []
    order = next((pair for pair in pairs if pair["name"] == "order"), None)
    if order is not None:
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
    source = sums["source"]
    options = sums["options"]
    yield "Gradients", f"{source['name']} ({source['kind']})"
    yield "Elements", f"{source['num_measured']:,} measured of {source['num_elements']:,}"
    yield "Orders", f"{options['orders']} per sum, or all where there are fewer"
    yield "Divided by W", "before the sum"
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


def _split(sentence: str) -> tuple[str, str]:
    """Return a sentence's words before and after its first colon: a heading and a paragraph."""
    heading, colon, rest = sentence.partition(": ")
    if not colon:
        return "", sentence
    return heading, rest[:1].upper() + rest[1:]
