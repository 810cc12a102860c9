"""The groups of parameters over the last observed steps, as rows of a figure.

Shapes: G groups, W workers.
"""

from dataclasses import dataclass

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.core.signals import Table
from rankscope.record import Columns, Run
from rankscope.web.bins import cells_of, robust_units
from rankscope.web.series import Row

MAX_STEPS = 32
"""Steps that are averaged."""
MAX_TABLE_ROWS = 400_000
"""Rows of the table that are read for it, though always the last flush."""
MAX_GROUPS = 96
"""Groups that are shown: of more, those in which a worker is farthest from the others."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Means over the last observed steps.

    Attributes:
        names: Group by group, in the model's order.
        norm_GW: Gradient norm, NaN where unknown.
        cosine_GW: Cosine with the sum of all others, NaN where unknown.
        num_steps: Steps that were averaged.
        last_step: The last of them.
    """

    names: list[str]
    norm_GW: Floats
    cosine_GW: Floats
    num_steps: int
    last_step: int


def last_groups(run: Run) -> Groups | None:
    """Return the groups' means over the last observed steps, None if there are no groups.

    Raises:
        RunError: A file of the run cannot be read.
    """
    columns = _last_rows(run)
    if columns is None:
        return None
    places: dict[str, int] = {}
    at = [places.setdefault(name, len(places)) for name in columns["group"].tolist()]
    steps = np.unique(columns["step"])
    shape = (len(places), max(run.num_workers, int(columns["rank"].max()) + 1))
    cells = np.array(at) * shape[1] + columns["rank"]
    return Groups(
        names=[str(name) for name in places],
        norm_GW=_means(cells, columns["grad_norm"], shape),
        cosine_GW=_means(cells, columns["cosine_rest"], shape),
        num_steps=len(steps),
        last_step=int(steps[-1]),
    )


def norm_rows(groups: Groups) -> list[Row]:
    """Return rows ``{group, deviation, value, rank}`` of a map of gradient norms.

    The deviation is the power of two by which a worker's norm exceeds the workers' median: 1 is
    twice the median, -1 is half of it.
    """
    norm_GW = np.where(groups.norm_GW > 0, groups.norm_GW, np.nan)
    names, values_GW = _known(groups.names, norm_GW)
    if not names:
        return []
    powers_GW = np.log2(values_GW) - np.log2(np.nanmedian(values_GW, axis=1, keepdims=True))
    return _rows(names, powers_GW, values_GW)


def direction_rows(groups: Groups) -> list[Row]:
    """Return the same of the cosines with the sum of all others, in robust units."""
    names, values_GW = _known(groups.names, groups.cosine_GW)
    return _rows(names, robust_units(values_GW, nearby=1), values_GW) if names else []


def _known(names: list[str], values_GW: Floats) -> tuple[list[str], Floats]:
    """Return the groups of which some worker has a value."""
    known = np.flatnonzero(np.isfinite(values_GW).any(axis=1))
    return [names[index] for index in known], values_GW[known]


def _rows(names: list[str], units_GW: Floats, values_GW: Floats) -> list[Row]:
    rows = [
        {"group": name, **row}
        for name, row in zip(names, cells_of(units_GW, values_GW), strict=True)
    ]
    if len(rows) <= MAX_GROUPS:
        return rows
    size_G = np.where(np.isnan(units_GW), 0.0, np.abs(units_GW)).max(axis=1)
    return [rows[index] for index in sorted(np.argsort(-size_G, kind="stable")[:MAX_GROUPS])]


def _last_rows(run: Run) -> Columns | None:
    """Return the rows of the last observed steps, None without any."""
    names = ("step", "rank", "group", "grad_norm", "cosine_rest")
    columns = run.latest(Table.GROUPS, *names, max_rows=MAX_TABLE_ROWS)
    steps = np.unique(columns["step"])
    if not len(steps):
        return None
    kept = columns["step"] >= steps[-MAX_STEPS:][0]
    return {name: values[kept] for name, values in columns.items()}


def _means(cells: np.ndarray, values: Floats, shape: tuple[int, int]) -> Floats:
    known = np.isfinite(values)
    size = shape[0] * shape[1]
    sums = np.bincount(cells[known], values[known], size)
    counts = np.bincount(cells[known], minlength=size)
    means = np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)
    result: Floats = means.reshape(shape)
    return result
