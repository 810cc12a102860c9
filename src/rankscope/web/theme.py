"""How figures look: two palettes, and the Vega-Lite configuration that each of them makes.

Figures name roles ("mean", "worker", "expected"), never colours; the configuration gives the roles
their colours. So one definition of a figure serves the light page, the dark page and PNG files.
"""

from dataclasses import dataclass
from typing import Any

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
"""Fonts that machines already have; nothing is loaded."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one mode, by role.

    Attributes:
        surface: Behind figures.
        ink: Text and the averaged curve, the most prominent mark.
        soft: Labels of axes, secondary text.
        hairline: Grid lines and rules.
        worker: Lines of single workers.
        band: The range between the lowest and the highest worker.
        named: Workers that a finding names.
        focus: The worker under the pointer.
        measured: A measured curve or point.
        expected: What sampling alone would give.
        settings: One colour for each of the study's settings, also for categories in general.
        diverging: Cosine from −1 over 0 to 1; distances from the middle, below and above.
        severities: Findings that are a note, a warning, an error.
    """

    surface: str
    ink: str
    soft: str
    hairline: str
    worker: str
    band: str
    named: str
    focus: str
    measured: str
    expected: str
    settings: tuple[str, ...]
    diverging: tuple[str, ...]
    severities: tuple[str, str, str]


LIGHT = Palette(
    surface="#ffffff",
    ink="#16202c",
    soft="#5d6876",
    hairline="#e7e9ec",
    worker="#7f9cc0",
    band="#c9d8ea",
    named="#c2362b",
    focus="#d9730d",
    measured="#1f5fae",
    expected="#8a94a1",
    settings=("#1f5fae", "#c76b14", "#2a8c6e", "#8a4f9e"),
    diverging=("#9c3d10", "#dd8f55", "#f4f4f2", "#6fa0d3", "#123f7d"),
    severities=("#38679f", "#9a5b00", "#b92d23"),
)

DARK = Palette(
    surface="#161b22",
    ink="#eef2f6",
    soft="#98a4b3",
    hairline="#29313c",
    worker="#7394bf",
    band="#2b405a",
    named="#f2776b",
    focus="#f5a54a",
    measured="#6fa8ec",
    expected="#7b8795",
    settings=("#6fa8ec", "#f0a04f", "#5cc4a0", "#c493d6"),
    diverging=("#d9702f", "#8a4a26", "#20262e", "#2f5d94", "#4388dc"),
    severities=("#84b3e8", "#eab04f", "#f2776b"),
)


def config(palette: Palette) -> dict[str, Any]:
    """Return the Vega-Lite configuration of a palette."""
    text = {"font": FONT, "fontSize": 11, "fill": palette.soft}
    return {
        "background": palette.surface,
        "font": FONT,
        "padding": {"left": 2, "right": 6, "top": 6, "bottom": 2},
        "view": {"stroke": None, "continuousHeight": 220},
        "axis": _axis(palette),
        "axisX": {"grid": False, "tickCount": 6},
        "axisY": {"tickCount": 5, "domain": False, "ticks": False},
        "header": {
            "labelColor": palette.ink,
            "labelFontSize": 12.5,
            "labelFontWeight": 600,
            "titleColor": palette.soft,
        },
        "title": {
            "color": palette.ink,
            "subtitleColor": palette.soft,
            "fontSize": 13,
            "fontWeight": 600,
            "subtitleFontSize": 11.5,
            "subtitlePadding": 4,
            "anchor": "start",
            "frame": "group",
            "offset": 8,
        },
        "legend": {
            "labelColor": palette.soft,
            "titleColor": palette.soft,
            "titleFontWeight": 400,
            "labelFontSize": 11,
            "titleFontSize": 11,
            "gradientThickness": 10,
        },
        "range": {"category": list(palette.settings), "diverging": list(palette.diverging)},
        "style": {**_mark_styles(palette), "label": text, "guide-label": text},
    }


def _axis(palette: Palette) -> dict[str, Any]:
    return {
        "labelColor": palette.soft,
        "titleColor": palette.soft,
        "titleFontWeight": 400,
        "titleFontSize": 11,
        "labelFontSize": 11,
        "titlePadding": 8,
        "labelPadding": 5,
        "domainColor": palette.expected,
        "tickColor": palette.expected,
        "tickSize": 4,
        "gridColor": palette.hairline,
        "labelFlush": False,
    }


def _mark_styles(palette: Palette) -> dict[str, Any]:
    def line(color: str, width: float, **more: Any) -> dict[str, Any]:
        return {"color": color, "strokeWidth": width, "strokeJoin": "round", **more}

    def words(color: str, **more: Any) -> dict[str, Any]:
        return {"color": color, "font": FONT, "fontSize": 11, **more}

    return {
        "mean": line(palette.ink, 2.2),
        "measured": line(palette.measured, 1.8),
        "expected": line(palette.expected, 1.6, strokeDash=[5, 4]),
        "worker": line(palette.worker, 1, strokeOpacity=0.7),
        "named": line(palette.named, 1.8),
        "focus": line(palette.focus, 2.6),
        "dot": {"color": palette.measured},
        "named-dot": {"color": palette.named},
        "whisker": line(palette.worker, 1.6),
        "setting": {"strokeWidth": 1.8, "strokeJoin": "round"},
        "band": {"color": palette.band, "fillOpacity": 0.85},
        "wash": {"color": palette.measured, "fillOpacity": 0.12},
        "crosshair": line(palette.soft, 1, strokeOpacity=0.7),
        "cell": {"stroke": palette.surface, "strokeWidth": 1},
        "crowded-cell": {"strokeWidth": 0},
        "diagonal": {"color": palette.hairline, "stroke": palette.surface, "strokeWidth": 1},
        "halo": {
            "stroke": palette.surface,
            "strokeWidth": 4,
            "strokeJoin": "round",
            "fontSize": 11,
        },
        "guide": line(palette.hairline, 1),
        **_severity_styles(palette),
        "soft-label": words(palette.soft),
        "ink-label": words(palette.ink),
        "named-label": words(palette.named, fontWeight=600),
        "measured-label": words(palette.measured, fontWeight=600),
    }


def _severity_styles(palette: Palette) -> dict[str, Any]:
    """Return the styles of findings: of the span of steps, and of the sign at its beginning."""
    styles: dict[str, Any] = {}
    for name, colour in zip(("note", "warning", "error"), palette.severities, strict=True):
        styles[f"{name}-span"] = {"color": colour, "strokeWidth": 5, "strokeOpacity": 0.4}
        styles[f"{name}-sign"] = {"color": colour, "strokeWidth": 2}
    return styles
