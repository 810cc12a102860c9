"""The result of a pass over gradients: a few numbers and a short sketch for each row.

:class:`Folding` lists the narrower sketches of them that are handed over.

A row is a group of parameters or, where the reduction is audited, a section of one
(:mod:`rankscope.bus.groups`); the sections of a group are neighbours.

All of it lies in one stretch of memory, so that it is emptied and copied by one operation:

    squared norms [R] float64 | non-finite [R] int64 | largest [R] float32, padded | sketches [R, k]

It is emptied when it is read. A kernel that overwrites it spares that.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from rankscope.bus.gradient_part import SKETCHES

_WORD = 8  # bytes


class GradientTotals:
    """Running totals of gradients in R rows, all on one device.

    The total over rows is a sum (of ``largest``, a maximum): everything here is linear or
    monotone, so that parts can be measured in any order.
    """

    __slots__ = ("_memory", "fresh", "tensors_to_fill")

    def __init__(self, memory: Tensor, num_rows: int, width: int) -> None:
        self._memory = memory
        first = 2 * num_rows + _words(num_rows)
        floats = memory[first:].view(torch.float32)
        # sketches, squared norms, largest and non-finite; without meaning while ``fresh``
        self.tensors_to_fill = (
            floats[: num_rows * width].view(num_rows, width),
            memory[:num_rows],
            memory[2 * num_rows : first].view(torch.float32)[:num_rows],
            memory[num_rows : 2 * num_rows].view(torch.int64),
        )
        self.fresh = False  # all is still to be set to 0; a kernel that overwrites all clears this

    @classmethod
    def zeros(cls, num_rows: int, width: int, device: torch.device) -> "GradientTotals":
        """Return the totals of nothing."""
        words = 2 * num_rows + _words(num_rows) + _words(num_rows * width)
        totals = cls(torch.empty(words, device=device, dtype=torch.float64), num_rows, width)
        totals.reset()
        return totals

    @property
    def memory(self) -> Tensor:
        """The memory of all of it."""
        self._empty()
        return self._memory

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sketches, squared norms, largest and non-finite; their memory stays where it is."""
        self._empty()
        return self.tensors_to_fill

    @property
    def sketches(self) -> Tensor:
        """Float32 ``[R, k]``: linear sketch of each row's gradient."""
        return self.tensors[0]

    @property
    def squared_norms(self) -> Tensor:
        """Float64 ``[R]``: sum of squares; infinite or NaN where an element is."""
        return self.tensors[1]

    @property
    def largest(self) -> Tensor:
        """Float32 ``[R]``: largest magnitude; infinite or NaN where an element is."""
        return self.tensors[2]

    @property
    def nonfinite(self) -> Tensor:
        """Int64 ``[R]``: how many elements are infinite or NaN."""
        return self.tensors[3]

    def reset(self) -> None:
        """Set all totals to those of nothing, in place."""
        self.fresh = True

    def _empty(self) -> None:
        if self.fresh:
            self._memory.zero_()
            self.fresh = False

    def add(self, other: "GradientTotals") -> None:
        """Add the totals of other elements, in place."""
        self.sketches.add_(other.sketches)
        self.squared_norms.add_(other.squared_norms)
        torch.maximum(self.largest, other.largest, out=self.largest)
        self.nonfinite.add_(other.nonfinite)

    def subtract(self, other: "GradientTotals") -> None:
        """Take a gradient out of the sum, in place; from the sketches alone, which are linear."""
        self.sketches.sub_(other.sketches)

    def estimate_norms(self) -> None:
        """Make the squared norms those of the sketches: unbiased, relative RMS error sqrt(2/k)."""
        self.squared_norms.copy_(self.sketches.double().square().sum(1))

    def scale(self, factor: float) -> None:
        """Make them the totals of gradients that were multiplied by a number, in place."""
        if factor != 1.0:
            self.sketches.mul_(factor)
            self.squared_norms.mul_(factor**2)
            self.largest.mul_(abs(factor))

    def clone(self) -> "GradientTotals":
        """Return a copy that later measurements leave alone."""
        return GradientTotals(self.memory.clone(), *self.tensors_to_fill[0].shape)


def _words(floats: int) -> int:
    """Return how many float64 numbers take as much memory as so many float32 ones."""
    return -(-floats * 4 // _WORD)


@dataclass(frozen=True)
class Folding:
    """The sketches that are handed over, one behind the other; a width of 0 leaves one out."""

    counts: tuple[int, ...]  # rows of the totals in each group ``[G]``
    wide: int  # width of the totals' sketches
    sketch_width: int  # numbers of the total's sketch, at most ``wide``
    group_width: int  # of each group's sketch
    audit_width: int  # of each row's sketch, of the local gradient and of the reduced one
    reduced: bool  # there is a reduced gradient

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

    @cached_property
    def wanted(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """For each sketch: its source, the first of its rows, the end, its width and its place.

        The source is 0 for the local gradient, 1 for the reduced one.
        """
        firsts = [0, *accumulate(self.counts)]
        each = [(row, row + 1) for row in range(self.num_rows)]
        parts = (
            (0, self.sketch_width, [(0, self.num_rows)]),
            (0, self.group_width, list(pairwise(firsts))),
            (0, self.audit_width, each),
            (1, self.audit_width * self.reduced, each),
        )
        wanted = []
        at = 0
        for source, width, spans in parts:
            for first, stop in spans if width else ():
                wanted.append((source, first, stop, width, at))
                at += width
        return tuple(wanted)

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


def fold(sketches: Tensor, width: int = 251, seed: int = 0) -> Tensor:
    """Make narrower sketches: entry c, with a random sign, is added to entry c mod ``width``.

    From ``[G, k]``, it makes ``[G, width]`` of the same type and device; a width that is not below
    k loses nothing. ``seed`` must be equal on workers that are compared. The narrow sketch is
    linear in the wide one, and so in the gradient. Its cosines are unbiased with an RMS error of
    about ``(1 - cos^2) * sqrt(1/width + 1/k)``.
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
        groups = totals.sketches
        if len(groups) != len(folding.counts):
            split = torch.split(groups, list(folding.counts))
            groups = torch.stack([rows.sum(0) for rows in split])
        parts.append(fold(groups, folding.group_width))
    if folding.audit_width:
        parts.append(_narrowed(totals.sketches, folding.audit_width))
        if reduced is not None:
            parts.append(_narrowed(reduced.sketches, folding.audit_width))
    if not parts:
        return totals.sketches.new_empty(0)
    return torch.cat([part.view(-1) for part in parts])


@lru_cache(maxsize=8)
def fold_signs(count: int, seed: int, device: torch.device) -> Tensor:
    """Return the signs with which entries are added up, float32 ``[count]``.

    They are those of torch's Mersenne Twister. numpy draws them: where a canary runs, each torch
    generator gets the canary's seed.
    """
    words = np.frombuffer(np.random.RandomState(seed).bytes(4 * count), "<u4")
    signs = (words & 1).astype(np.float32) * 2 - 1
    return torch.from_numpy(signs).to(device)


def _narrowed(sketches: Tensor, width: int) -> Tensor:
    return sketches if sketches.shape[1] == width else fold(sketches, width)
