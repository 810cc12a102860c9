"""Two runs compared: where they first part, by how much, and whether rounding explains it."""

from rankscope.tools.diff.compare import compare_runs
from rankscope.tools.diff.result import (
    Alignment,
    Change,
    Comparison,
    Curve,
    DiffClass,
    DifferenceGrowth,
    Jump,
    Moment,
    Parting,
)

__all__ = [
    "Alignment",
    "Change",
    "Comparison",
    "Curve",
    "DiffClass",
    "DifferenceGrowth",
    "Jump",
    "Moment",
    "Parting",
    "compare_runs",
]
