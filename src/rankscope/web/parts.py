"""What all figures are made of: their data, the axis of steps, domains and sizes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Literal

import altair as alt

from rankscope.web.series import Row

Width = int | Literal["container"]
"""Pixels, or ``"container"`` to fill the column of the page."""


class Tables:
    """The data of a page's figures: each table once, under a name that its content gives it."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}

    def add(self, rows: Sequence[Row]) -> alt.NamedData:
        """Keep a table and return the reference that figures hold."""
        text = json.dumps(rows, separators=(",", ":"))
        name = "t" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.rows[name] = list(rows)
        return alt.NamedData(name=name)


def rate_domain(*values: Sequence[float | None], floor: float = 1e-3) -> list[float]:
    """Return a vertical domain that holds zero and all values with a little room above."""
    known = [v for column in values for v in column if v is not None]
    high, low = max([*known, 0.0]), min([*known, 0.0])
    room = 0.06 * max(high - low, floor)
    return [low - room if low < 0 else 0.0, max(high + room, floor)]


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    """Return one field of all rows."""
    return [row[name] for row in rows]


def finish(layers: Sequence[alt.Chart], width: Width, height: int) -> alt.LayerChart:
    """Return the layers as one figure of that size."""
    return alt.LayerChart(layer=list(layers), width=width, height=height)


def step_axis(title: str | None = "step", ticks: int = 6, field: str = "step") -> alt.X:
    """Return the horizontal axis of every curve: whole steps."""
    axis = alt.Axis(title=title, format=",d", tickMinStep=1, tickCount=ticks)
    return alt.X(f"{field}:Q", axis=axis, scale=alt.Scale(nice=False, zero=False))


def tip(name: str, title: str) -> alt.Tooltip:
    """Return a line of a tooltip with a measured value."""
    return alt.Tooltip(f"{name}:Q", title=title, format=".4~g")
