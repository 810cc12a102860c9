"""Floating-point sums: their error in any order, and what parts two runs."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Shows a part's name, how much of it is done, and all there is to do."""


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""
