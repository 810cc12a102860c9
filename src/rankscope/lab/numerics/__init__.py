"""Floating-point sums: their error in any order, and what parts two runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.report import needs_extra


def write_numerics_page(
    directory: Path, sums: Mapping[str, Any], growth: Mapping[str, Any] | None = None
) -> Path:
    """Write the page ``numerics.html`` and its figures as PNG files, and return the page's path.

    Args:
        directory: Made if need be.
        sums: The JSON form of measured sums (see ``rankscope.lab.numerics.spread``).
        growth: The JSON form of pairs of trainings; None when none was run.
    """
    with needs_extra("numerics.html", "web"):
        from rankscope.lab.numerics.page import write_page
    return write_page(directory, sums, growth)
