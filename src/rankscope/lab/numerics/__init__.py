"""Floating-point sums: their error in any order, and what parts two runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.report import needs_extra


def write_numerics_page(
    directory: Path, sums: Mapping[str, Any], growth: Mapping[str, Any] | None = None
) -> Path:
    """Write the page of sums, and of pairs of trainings if any, with figures; return its path."""
    with needs_extra("numerics.html", "web"):
        from rankscope.lab.numerics.page import write_page
    return write_page(directory, sums, growth)
