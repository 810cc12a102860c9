"""What all figures are made of: their data, layers, the axis of steps, domains and sizes.

A run's figures are written as Vega-Lite takes them. Altair, which other pages use, would take
longer to check and copy their specifications than the longest run takes to read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from rankscope.web.series import Row

Spec = dict[str, Any]
"""A Vega-Lite specification, or a part of one."""
Width = int | Literal["container"]
"""Pixels, or ``"container"`` to fill the column of the page."""

_TYPES = {"Q": "quantitative", "O": "ordinal", "N": "nominal"}


class Tables:
    """The data of a page's figures: each table once, under a name that its content gives it."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}

    def add(self, rows: Sequence[Row]) -> Spec:
        """Keep a table and return the reference that figures hold."""
        text = json.dumps(rows, separators=(",", ":"))
        name = "t" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.rows[name] = list(rows)
        return {"name": name}


def rate_domain(*values: Sequence[float | None], floor: float = 1e-3) -> list[float]:
    """Return a vertical domain that holds zero and all values with a little room above."""
    known = [v for column in values for v in column if v is not None]
    high, low = max([*known, 0.0]), min([*known, 0.0])
    room = 0.06 * max(high - low, floor)
    return [low - room if low < 0 else 0.0, max(high + room, floor)]


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    """Return one field of all rows."""
    return [row[name] for row in rows]


def channel(field: str, **options: Any) -> Spec:
    """Return how a field is shown.

    >>> channel("loss:Q", title="loss")
    {'field': 'loss', 'type': 'quantitative', 'title': 'loss'}
    """
    name, _, kind = field.partition(":")
    return {"field": name, "type": _TYPES[kind], **options}


def layer(
    mark: str, data: Spec, encoding: Mapping[str, Any], *transform: Spec, **options: Any
) -> Spec:
    """Return one layer of a figure.

    Args:
        mark: What is drawn: ``line``, ``rect`` and so on.
        data: From :meth:`Tables.add`.
        encoding: Channels by name.
        transform: What is done with the data first.
        options: Of the mark.
    """
    steps = {"transform": list(transform)} if transform else {}
    return {"data": data, "mark": {"type": mark, **options}, "encoding": dict(encoding), **steps}


def layered(layers: Sequence[Spec], width: Width, height: int, params: Sequence[Spec] = ()) -> Spec:
    """Return layers of :func:`layer` as one figure of that size, with its parameters."""
    spec = {"layer": list(layers), "width": width, "height": height}
    return {**spec, "params": list(params)} if params else spec


def pointed(name: str, at: Spec, fields: Sequence[str], **options: Any) -> Spec:
    """Return a parameter that the pointer sets to what is nearest in a layer.

    Args:
        name: Its name.
        at: The layer, which gets a name.
        fields: What it takes from the data.
        options: Of the selection.
    """
    at["name"] = f"{name}-layer"
    moves = {"on": "pointerover", "clear": "pointerout", "nearest": True}
    select = {"type": "point", "fields": list(fields), **(options or moves)}
    return {"name": name, "select": select, "views": [at["name"]]}


def finish(layers: Sequence[alt.Chart], width: Width, height: int) -> alt.LayerChart:
    """Return layers of Altair as one figure of that size."""
    return alt.LayerChart(layer=list(layers), width=width, height=height)


def step_axis(
    title: str | None = "step", ticks: int = 6, field: str = "step", **scale: Any
) -> Spec:
    """Return the horizontal axis of every curve: whole steps; ``scale`` adds to its scale."""
    axis = {"title": title, "format": ",d", "tickMinStep": 1, "tickCount": ticks}
    return channel(f"{field}:Q", axis=axis, scale={"nice": False, "zero": False, **scale})


def tip(name: str, title: str) -> Spec:
    """Return a line of a tooltip with a measured value."""
    return channel(f"{name}:Q", title=title, format=".4~g")


def step_tip() -> Spec:
    """Return a line of a tooltip with the step."""
    return channel("step:Q", title="step", format=",d")
