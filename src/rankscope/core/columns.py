"""The workers' columns of consecutive steps, side by side: what is asked of each is computed once.

Legend of shapes: S steps, C columns of one type, W workers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.signals import DType, Source, Table, signals
from rankscope.core.step import MISSING_INT, GatheredStep

_NAMES = {
    dtype: tuple(s.name for s in signals(Table.WORKERS, Source.LOCAL) if s.dtype is dtype)
    for dtype in (DType.INT, DType.FLOAT, DType.BOOL)
}
_PLACES = {name: (dtype, at) for dtype, names in _NAMES.items() for at, name in enumerate(names)}


class Columns:
    """The LOCAL columns of the workers table in consecutive steps of as many workers.

    Args:
        steps: The steps, at least one.
    """

    def __init__(self, steps: Sequence[GatheredStep]) -> None:
        self._steps = steps
        self._values: dict[DType, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column ``[S, W]``.

        Raises:
            KeyError: There is no such column.
        """
        dtype, at = _PLACES[name]
        column: NDArray[Any] = self._of_type(dtype)[:, at]
        return column

    def alike(self, name: str, index: int) -> bool:
        """Return whether all workers have the same value in a step; NaN is equal to nothing."""
        dtype, at = _PLACES[name]
        return self._alike[dtype][index][at]

    def some_true(self, name: str, index: int) -> bool:
        """Return whether a flag is set on some worker in a step."""
        return self._some_true[index][_PLACES[name][1]]

    def all_true(self, name: str, index: int) -> bool:
        """Return whether a flag is set on all workers in a step."""
        return self._all_true[index][_PLACES[name][1]]

    def some_known(self, name: str, index: int) -> bool:
        """Return whether some worker has a value of an integer column in a step."""
        return self._some_known[index][_PLACES[name][1]]

    def all_known(self, name: str, index: int) -> bool:
        """Return whether all workers have a value of an integer column in a step."""
        return self._all_known[index][_PLACES[name][1]]

    def ends(self, name: str, index: int) -> tuple[float, float]:
        """Return the smallest and the largest value of a float column; NaN if one is missing."""
        at = _PLACES[name][1]
        return self._smallest[index][at], self._largest[index][at]

    def _of_type(self, dtype: DType) -> NDArray[Any]:
        """Return the columns of one type ``[S, C, W]``."""
        if dtype not in self._values:
            names = _NAMES[dtype]
            flat = np.concatenate([step.workers[name] for step in self._steps for name in names])
            self._values[dtype] = flat.reshape(len(self._steps), len(names), -1)
        return self._values[dtype]

    @cached_property
    def _alike(self) -> dict[DType, list[list[bool]]]:
        values = {dtype: self._of_type(dtype) for dtype in (DType.INT, DType.FLOAT)}
        return {dtype: (v == v[..., :1]).all(axis=2).tolist() for dtype, v in values.items()}

    @cached_property
    def _some_true(self) -> list[list[bool]]:
        return _listed(self._of_type(DType.BOOL).any(axis=2))

    @cached_property
    def _all_true(self) -> list[list[bool]]:
        return _listed(self._of_type(DType.BOOL).all(axis=2))

    @cached_property
    def _known(self) -> NDArray[np.bool_]:
        return np.asarray(self._of_type(DType.INT) != MISSING_INT)

    @cached_property
    def _some_known(self) -> list[list[bool]]:
        return _listed(self._known.any(axis=2))

    @cached_property
    def _all_known(self) -> list[list[bool]]:
        return _listed(self._known.all(axis=2))

    @cached_property
    def _smallest(self) -> list[list[float]]:
        return list(self._of_type(DType.FLOAT).min(axis=2).tolist())

    @cached_property
    def _largest(self) -> list[list[float]]:
        return list(self._of_type(DType.FLOAT).max(axis=2).tolist())


def _listed(flags: Any) -> list[list[bool]]:
    found: list[list[bool]] = flags.tolist()
    return found
