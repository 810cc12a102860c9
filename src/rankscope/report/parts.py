"""Parts of all figures: their data, layers, the axis of steps, domains and sizes.

Figures are written as Vega-Lite takes them: as wide as the column of the page, unless ``sized``.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from rankscope.report.series import Row

Spec = dict[str, Any]  # a Vega-Lite specification, or a part of one
DOT = {"filled": True, "opacity": 1}  # options of a point that is a filled dot
_RANK_TICKS = 8
_TYPES = {"Q": "quantitative", "O": "ordinal", "N": "nominal"}


class Tables:
    """The data of a page's figures: each table once, under a name that comes from its content."""

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
    high = max([*known, 0.0])
    low = min([*known, 0.0])
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
    """Return one layer of a figure: a mark, data of :meth:`Tables.add`, channels, transforms."""
    steps = {"transform": list(transform)} if transform else {}
    return {"data": data, "mark": {"type": mark, **options}, "encoding": dict(encoding), **steps}


def layered(layers: Sequence[Spec], height: int, params: Sequence[Spec] = ()) -> Spec:
    """Return layers of :func:`layer` as one figure of that height, with its parameters."""
    spec = {"layer": list(layers), "width": "container", "height": height}
    return {**spec, "params": list(params)} if params else spec


def sized(spec: Spec, width: int, height: int | None = None) -> Spec:
    """Return a figure with a width in pixels, and with another height if one is given."""
    return {**spec, "width": width, "height": spec["height"] if height is None else height}


def titled(spec: Spec, text: str, subtitle: str = "") -> Spec:
    """Return a figure with a title, and a line below it."""
    return {**spec, "title": {"text": text, **({"subtitle": subtitle} if subtitle else {})}}


def headed(spec: Spec, text: str, subtitle: str) -> Spec:
    """Return a sheet of figures with the large title of a PNG file."""
    look = {"fontSize": 21, "subtitleFontSize": 14, "offset": 18, "anchor": "start"}
    return {**spec, "title": {"text": text, "subtitle": subtitle, **look}}


def colours(field: str, names: Sequence[str], legend: str = "") -> Spec:
    """Return the colour of each name in their order; ``legend`` is the symbol of a legend above."""
    shown = {"title": None, "orient": "top", "symbolType": legend} if legend else None
    return channel(f"{field}:N", scale={"domain": list(names)}, legend=shown)


def dashes(field: str, patterns: Mapping[Any, Sequence[int]]) -> Spec:
    """Return the dashes of a line by the value of a field, without a legend."""
    scale = {"domain": list(patterns), "range": [list(dash) for dash in patterns.values()]}
    return channel(f"{field}:N", scale=scale, legend=None)


def pointed(name: str, at: Spec, fields: Sequence[str], **options: Any) -> Spec:
    """Return a parameter that the pointer sets to the nearest datum's fields in a layer."""
    at["name"] = f"{name}-layer"
    moves = {"on": "pointerover", "clear": "pointerout", "nearest": True}
    select = {"type": "point", "fields": list(fields), **(options or moves)}
    return {"name": name, "select": select, "views": [at["name"]]}


def zoomable(at: Spec) -> Spec:
    """Return a parameter that zooms a figure's steps by Shift and wheel; a double click resets."""
    select = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}
    return {"name": "zoom", "select": select, "bind": "scales", "views": [at["name"]]}


def step_axis(ticks: int = 6, field: str = "step", **scale: Any) -> Spec:
    """Return the horizontal axis of every curve: whole steps; ``scale`` adds to its scale."""
    whole = "datum.value % 1 ? '' : datum.label"  # tickMinStep fails where the axis is short
    axis = {
        "title": "step",
        "format": ",d",
        "tickMinStep": 1,
        "tickCount": ticks,
        "labelExpr": whole,
    }
    return channel(f"{field}:Q", axis=axis, scale={"nice": False, "zero": False, **scale})


def rank_axis(num_workers: int) -> Spec:
    """Return an axis of ranks with labels of its own: ``tickMinStep`` fails where it is short."""
    steps = (size * 10**power for power in count() for size in (1, 2, 5))
    every = next(step for step in steps if step * _RANK_TICKS >= num_workers)
    return {"title": "rank", "format": ",d", "values": list(range(0, num_workers, every))}


def log_domain(values: Iterable[float | None], room: float = 1.6) -> list[float]:
    """Return a domain of a logarithmic axis that holds all positive values."""
    known = [value for value in values if value and value > 0]
    return [min(known, default=1e-9) / room, max(known, default=1.0) * room]


def log_axis(
    field: str, domain: Sequence[float], title: str | None = None, form: str = ".0e"
) -> Spec:
    """Return a logarithmic axis with a few lines: at powers of ten, or at 1, 2 and 5 times them."""
    low = math.ceil(math.log10(domain[0]))
    high = math.floor(math.log10(domain[1]))
    every = max(1, math.ceil((high - low + 1) / 7))
    digits = (1,) if high - low > 1 else (1, 2, 5)
    first = low if len(digits) == 1 else low - 1
    values = [float(f"{n}e{power}") for power in range(first, high + 1, every) for n in digits]
    axis = {"title": title, "format": form, "values": values}
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return channel(f"{field}:Q", axis=axis, scale=scale)


def tip(name: str, title: str) -> Spec:
    """Return a line of a tooltip with a measured value."""
    return channel(f"{name}:Q", title=title, format=".4~g")


def step_tip() -> Spec:
    """Return a line of a tooltip with the step."""
    return channel("step:Q", title="step", format=",d")
