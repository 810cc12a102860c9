"""Narrower sketches from wide ones, and the list of those to hand over."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rankscope.bus.measured import SKETCHES
from rankscope.gradients.totals import GradientTotals

# sources
LOCAL = 0
REDUCED = 1


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

        The sketches of one row stand together, so that a row is fetched once.
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
    wanted = []
    at = 0
    for source, width, spans in parts:
        for first, stop in spans if width else ():
            wanted.append((source, first, stop, width, at))
            at += width
    return tuple(wanted)


def fold(sketches: Tensor, width: int = 251, seed: int = 0) -> Tensor:
    """Make narrower sketches: entry c, with a random sign, is added to entry c mod ``width``.

    The narrow sketch is linear in the wide one, and so in the gradient. Its cosines are unbiased
    with an RMS error of about ``(1 - cos^2) * sqrt(1/width + 1/k)``.

    Args:
        sketches: float32 or float64 ``[G, k]``.
        width: Width of the result; where it is not below k, nothing is lost or gained.
        seed: Seed of the signs; equal on workers that are compared.

    Returns:
        ``[G, width]`` in the same type, on the same device.
    """
    num_rows, wide = sketches.shape
    padded = sketches.new_zeros(num_rows, wide + -wide % width)
    torch.mul(sketches, fold_signs(wide, seed, sketches.device), out=padded[:, :wide])
    return padded.view(num_rows, padded.shape[1] // width, width).sum(1)


def fold_plain(totals: GradientTotals, reduced: GradientTotals | None, folding: Folding) -> Tensor:
    """Return all sketches that are handed over ``[n]``, in plain torch, on their device."""
    parts = []
    if folding.sketch_width:
        total = totals.sketches.sum(0, keepdim=True)
        parts.append(_narrowed(total, folding.sketch_width))
    if folding.group_width:
        parts.append(fold(_by_group(totals.sketches, folding.counts), folding.group_width))
    if folding.audit_width:
        parts.append(_narrowed(totals.sketches, folding.audit_width))
        if reduced is not None:
            parts.append(_narrowed(reduced.sketches, folding.audit_width))
    if not parts:
        return totals.sketches.new_empty(0)
    return torch.cat([part.view(-1) for part in parts])


@functools.lru_cache(maxsize=8)
def fold_signs(count: int, seed: int, device: torch.device) -> Tensor:
    """Return the signs with which entries are added up, float32 ``[count]``."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    bits = torch.randint(2, (count,), generator=generator, device="cpu")
    return bits.mul_(2).sub_(1).to(device, torch.float32)


def _by_group(sketches: Tensor, counts: Sequence[int]) -> Tensor:
    """Add up neighbouring rows: as many as each group has."""
    if len(sketches) == len(counts):
        return sketches
    return torch.stack([rows.sum(0) for rows in torch.split(sketches, list(counts))])


def _narrowed(sketches: Tensor, width: int) -> Tensor:
    """Return narrow sketches of rows."""
    return sketches if sketches.shape[1] == width else fold(sketches, width)
