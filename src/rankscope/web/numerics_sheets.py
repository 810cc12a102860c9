"""The figures of ``rankscope numerics`` as PNG files, several panels to a sheet."""

from collections.abc import Mapping, Sequence

import altair as alt

from rankscope.web import numerics_figures as figures
from rankscope.web import numerics_growth_figures as growth_figures
from rankscope.web.numerics_figures import Values, log_domain
from rankscope.web.parts import Tables


def error_sheet(tables: Tables, sums: Values) -> alt.HConcatChart:
    """Return the error over world sizes, one panel for each type of buffer."""
    panels = [
        figures.errors(tables, sums, name, width=310, height=280).properties(
            title=_title(f"{name} buffers", "relative error of the reduced gradient")
        )
        for name in figures.types_of(sums)
    ]
    return alt.hconcat(*panels, spacing=46).properties(
        title=_heading(
            "How far a sum of gradients is from the truth",
            "Points: measured. Dashed: expected from rounding. Thin: bound. "
            "Blue: ring. Orange: tree. Green: ring, added in float32.",
        )
    )


def spread_sheet(tables: Tables, sums: Values) -> alt.HConcatChart:
    """Return how far results of different orders lie apart."""
    words = (
        ("spread-median", "Spread of an element", "median, units in the last place"),
        ("spread-p99", "The most sensitive hundredth", "99 % of elements have less, ULP"),
        ("spread-share", "Elements whose bits depend on it", "share"),
    )
    panels = [
        figures.spread(tables, sums, name, width=310, height=250).properties(
            title=_title(title, unit)
        )
        for name, title, unit in words
    ]
    colours = ("Blue", "Orange", "Green")
    named = ". ".join(
        f"{colour}: {name}" for colour, name in zip(colours, figures.types_of(sums), strict=False)
    )
    return alt.hconcat(*panels, spacing=46).properties(
        title=_heading("What the order of the same sum changes", f"In a ring. {named}.")
    )


def layer_sheet(tables: Tables, sums: Values) -> alt.LayerChart:
    """Return the error of each layer."""
    return figures.layer_errors(tables, sums, width=880, height=150).properties(
        title=_heading(
            "The error layer by layer",
            "In a ring. Points: measured. Ticks: expected from rounding.",
        )
    )


def growth_sheet(tables: Tables, growth: Values, others: Sequence[Values] = ()) -> alt.VConcatChart:
    """Return how parameters part, and what it does to the held-out loss.

    Args:
        tables: Keeps the data.
        growth: Pairs of trainings.
        others: The same with other seeds, drawn faintly behind.
    """
    panels = [
        growth_figures.curves(
            tables, growth, name, width=1010, height=height, room=1.17, others=others
        ).properties(title=_title(title, unit))
        for name, title, unit, height in (
            ("distance", "Parameters", "relative distance from the first training", 330),
            ("evaluation", "Held-out loss", "difference from the first training, nats per token",
             240),
        )
    ]  # fmt: skip
    return alt.VConcatChart(
        vconcat=panels,
        spacing=34,
        title=_heading(
            "Trainings that differ in the reduction alone, beside one on other data",
            "The same model, data and seed in all but the last, which sees the samples in another "
            "order.",
        ),
    )


def settings_sheet(tables: Tables, settings: Mapping[str, Values]) -> alt.HConcatChart:
    """Return how parameters part under several settings of the optimizer, on one scale.

    Args:
        tables: Keeps the data.
        settings: Pairs of trainings by the name of the setting.
    """
    values = [
        row["value"]
        for growth in settings.values()
        for row in growth_figures.growth_rows(growth, "distance")
    ]
    domain = log_domain(values, room=1.9)
    panels = [
        growth_figures.curves(
            tables,
            growth,
            "distance",
            width=1040 // len(settings) - 40,
            height=330,
            room=1.5,
            domain=domain,
        ).properties(title=_title(name, "relative distance of the parameters"))
        for name, growth in settings.items()
    ]
    return alt.hconcat(*panels, spacing=34).properties(
        title=_heading(
            "How fast rounding grows depends on how the model is trained",
            "Each training differs from the first of its panel in one thing.",
        )
    )


def _title(text: str, subtitle: str) -> alt.TitleParams:
    return alt.TitleParams(text=text, subtitle=subtitle)


def _heading(text: str, subtitle: str) -> alt.TitleParams:
    return alt.TitleParams(
        text=text, subtitle=subtitle, fontSize=21, subtitleFontSize=14, offset=18, anchor="start"
    )
