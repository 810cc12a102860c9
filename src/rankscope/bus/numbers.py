"""Numbers as words, where one may be undefined."""

from typing import Any

import numpy as np

from rankscope.stats.arrays import MISSING_INT

UNKNOWN = "–"


def missing(value: Any) -> bool:
    """Return whether a value is undefined: None, NaN or ``MISSING_INT``."""
    return value is None or value == MISSING_INT or bool(value != value)


def number(value: Any, digits: int = 3) -> str:
    """Return a number for reading: ``0.253``, ``1,024``, ``2.1e-07``, or a dash if undefined.

    Below 1e-9 it is zero: the rounding error of equal float64 values.
    """
    if missing(value):
        return UNKNOWN
    if isinstance(value, int | np.integer):
        return f"{int(value):,}"
    size = abs(float(value))
    if size < 1e-9 or 1e-3 <= size < 1e3:
        return f"{float(value):.{digits}f}"
    return f"{float(value):,.0f}" if 1e3 <= size < 1e7 else f"{float(value):.1e}"


def whole(value: Any) -> str:
    """Return a value as a whole number: ``960``, or a dash if undefined."""
    return UNKNOWN if missing(value) else f"{round(value):,}"
