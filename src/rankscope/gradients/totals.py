"""The result of a pass over gradients: a few numbers and a short sketch for each row.

A row is a group of parameters or, where the reduction is audited, a section of one
(:mod:`rankscope.bus.groups`); the sections of a group are neighbours.

All of it lies in one stretch of memory, so that it is emptied and copied by one operation:

    squared norms [R] float64 | non-finite [R] int64 | largest [R] float32, padded | sketches [R, k]

It is emptied when it is read. A kernel that overwrites it spares that.
"""

import torch
from torch import Tensor

_WORD = 8  # bytes


class GradientTotals:
    """Running totals of gradients in R rows, all on one device.

    The total over rows is a sum (of ``largest``, a maximum): everything here is linear or
    monotone, so that parts can be measured in any order.

    Args:
        memory: float64 ``[totals_words(num_rows, width)]``, which holds all of it.
        num_rows: R.
        width: Sketch width k.

    Attributes:
        fresh: Whether all is still to be set to 0; a kernel that overwrites all of it clears this.
    """

    __slots__ = ("_memory", "_tensors", "fresh")

    def __init__(self, memory: Tensor, num_rows: int, width: int) -> None:
        self._memory = memory
        first = 2 * num_rows + _words(num_rows)
        floats = memory[first:].view(torch.float32)
        self._tensors = (
            floats[: num_rows * width].view(num_rows, width),
            memory[:num_rows],
            memory[2 * num_rows : first].view(torch.float32)[:num_rows],
            memory[num_rows : 2 * num_rows].view(torch.int64),
        )
        self.fresh = False

    @classmethod
    def zeros(cls, num_rows: int, width: int, device: torch.device) -> "GradientTotals":
        """Return the totals of nothing."""
        words = totals_words(num_rows, width)
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
        return self._tensors

    @property
    def tensors_to_fill(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same; while ``fresh``, their content has no meaning."""
        return self._tensors

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
        return GradientTotals(self.memory.clone(), *self._tensors[0].shape)


def totals_words(num_rows: int, width: int) -> int:
    """Return how many float64 numbers take as much memory as totals do."""
    return 2 * num_rows + _words(num_rows) + _words(num_rows * width)


def _words(floats: int) -> int:
    """Return how many float64 numbers take as much memory as so many float32 ones."""
    return -(-floats * 4 // _WORD)
