"""What a pass over gradients leaves behind: a few numbers and a short sketch for each row.

A row is a group of parameters or, where the reduction is audited, a section of one
(:mod:`rankscope.core.sections`); the sections of a group are neighbours.

All of it lies in one stretch of memory, so that it is emptied and copied by one operation:

    squared norms [R] float64 | non-finite [R] int64 | largest [R] float32, padded | sketches [R, k]
"""

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 8  # bytes


class HostArrays(NamedTuple):
    """Totals that lie on the host.

    Attributes:
        squared_norms: float64 ``[R]``.
        largest: float32 ``[R]``.
        nonfinite: int64 ``[R]``.
        sketches: Address of the first sketch.
    """

    squared_norms: NDArray[Any]
    largest: NDArray[Any]
    nonfinite: NDArray[Any]
    sketches: int


class GradientTotals:
    """Running totals of gradients in R rows, all on one device.

    The total over rows is a sum (of ``largest``, a maximum): everything here is linear or
    monotone, so that parts can be measured in any order.

    Args:
        memory: float64 ``[totals_words(num_rows, width)]``, which holds all of it.
        num_rows: R.
        width: Sketch width k.

    Attributes:
        sketches: float32 ``[R, k]``: linear sketch of each row's gradient.
        squared_norms: float64 ``[R]``: sum of squares; infinite or NaN where an element is.
        largest: float32 ``[R]``: largest magnitude; infinite or NaN where an element is.
        nonfinite: int64 ``[R]``: how many elements are infinite or NaN.
    """

    __slots__ = ("_arrays", "largest", "memory", "nonfinite", "sketches", "squared_norms")

    def __init__(self, memory: Tensor, num_rows: int, width: int) -> None:
        self.memory = memory
        self._arrays: HostArrays | None = None
        first = 2 * num_rows + _words(num_rows)
        self.squared_norms = memory[:num_rows]
        self.nonfinite = memory[num_rows : 2 * num_rows].view(torch.int64)
        self.largest = memory[2 * num_rows : first].view(torch.float32)[:num_rows]
        floats = memory[first:].view(torch.float32)
        self.sketches = floats[: num_rows * width].view(num_rows, width)

    @classmethod
    def zeros(cls, num_rows: int, width: int, device: torch.device) -> "GradientTotals":
        """Return the totals of nothing."""
        words = totals_words(num_rows, width)
        memory = torch.zeros(words, device=device, dtype=torch.float64)
        return cls(memory, num_rows, width)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sketches, squared norms, largest and non-finite; their memory stays where it is."""
        return self.sketches, self.squared_norms, self.largest, self.nonfinite

    @property
    def arrays(self) -> "HostArrays":
        """Squared norms, largest and non-finite as arrays of the same memory, on the host."""
        if self._arrays is None:
            scalars = self.squared_norms.numpy(), self.largest.numpy(), self.nonfinite.numpy()
            self._arrays = HostArrays(*scalars, self.sketches.data_ptr())
        return self._arrays

    def reset(self) -> None:
        """Set all totals to those of nothing, in place."""
        self.memory.zero_()

    def add(self, other: "GradientTotals") -> None:
        """Add the totals of other elements, in place."""
        self.sketches.add_(other.sketches)
        self.squared_norms.add_(other.squared_norms)
        torch.maximum(self.largest, other.largest, out=self.largest)
        self.nonfinite.add_(other.nonfinite)

    def scale(self, factor: float) -> None:
        """Make them the totals of gradients that were multiplied by a number, in place."""
        if factor != 1.0:
            self.sketches.mul_(factor)
            self.squared_norms.mul_(factor**2)
            self.largest.mul_(abs(factor))

    def clone(self) -> "GradientTotals":
        """Return a copy that later measurements leave alone."""
        return GradientTotals(self.memory.clone(), *self.sketches.shape)


def totals_words(num_rows: int, width: int) -> int:
    """Return how many float64 numbers take as much memory as totals do."""
    return 2 * num_rows + _words(num_rows) + _words(num_rows * width)


def _words(floats: int) -> int:
    """Return how many float64 numbers take as much memory as so many float32 ones."""
    return -(-floats * 4 // _WORD)
