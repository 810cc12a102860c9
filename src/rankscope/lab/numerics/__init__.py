"""Floating-point sums: their error in any order, and what parts two runs."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # a part's name, how much is done, and how much there is


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""
