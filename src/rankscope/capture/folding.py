"""Which sketches are handed over, and how they are made of those of a gradient's rows."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from rankscope.core.measured import SKETCHES

LOCAL, REDUCED = 0, 1  # sources


@dataclass(frozen=True, slots=True)
class Folding:
    """The sketches that are handed over, one behind the other.

    Attributes:
        counts: How many rows of the totals each group has ``[G]``.
        wide: Width of the totals' sketches.
        sketch_width: Numbers of the total's sketch, at most ``wide``; or 0.
        group_width: Numbers of each group's sketch, or 0.
        audit_width: Numbers of each row's sketch, of the local gradient and of the reduced one;
            or 0.
        reduced: Whether there is a reduced gradient.
    """

    counts: tuple[int, ...]
    wide: int
    sketch_width: int
    group_width: int
    audit_width: int
    reduced: bool

    @property
    def num_rows(self) -> int:
        """Rows of the totals."""
        return sum(self.counts)

    @property
    def lengths(self) -> dict[str, int]:
        """How many numbers each part has, by its name in ``SKETCHES``, in that order."""
        audit = self.num_rows * self.audit_width
        sizes = (self.sketch_width, len(self.counts) * self.group_width, audit)
        return dict(zip(SKETCHES, (*sizes, audit * self.reduced), strict=True))

    @property
    def wanted(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """For each sketch: its source, the first of its rows, the end, its width and its place."""
        return _wanted(self)

    @property
    def by_row(self) -> list[tuple[int, int, int, int]]:
        """For each sketch and each of its rows: the source, the row, the width and the place.

        What is made of one row stands together, so that a row is fetched once.
        """
        return sorted(
            (source, row, width, at)
            for source, first, stop, width, at in self.wanted
            for row in range(first, stop)
        )


@lru_cache(maxsize=16)
def _wanted(folding: Folding) -> tuple[tuple[int, int, int, int, int], ...]:
    firsts = [0, *accumulate(folding.counts)]
    rows = range(folding.num_rows)
    each = list(zip(rows, range(1, folding.num_rows + 1), strict=True))
    parts = (
        (LOCAL, folding.sketch_width, [(0, folding.num_rows)]),
        (LOCAL, folding.group_width, list(pairwise(firsts))),
        (LOCAL, folding.audit_width, each),
        (REDUCED, folding.audit_width * folding.reduced, each),
    )
    wanted, at = [], 0
    for source, width, spans in parts:
        for first, stop in spans if width else ():
            wanted.append((source, first, stop, width, at))
            at += width
    return tuple(wanted)
