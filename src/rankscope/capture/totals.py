"""What a pass over gradients leaves behind: a few numbers and a short sketch for each row.

A row is a group of parameters or, where the reduction is audited, a section of one
(:mod:`rankscope.core.sections`); the sections of a group are neighbours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class GradientTotals:
    """Running totals of gradients in R rows, all on one device.

    The total over rows is a sum (of ``largest``, a maximum): everything here is linear or
    monotone, so that parts can be measured in any order.

    Attributes:
        sketches: float32 ``[R, k]``: linear sketch of each row's gradient.
        squared_norms: float64 ``[R]``: sum of squares; infinite or NaN where an element is.
        largest: float32 ``[R]``: largest magnitude; infinite or NaN where an element is.
        nonfinite: int64 ``[R]``: how many elements are infinite or NaN.
    """

    sketches: Tensor
    squared_norms: Tensor
    largest: Tensor
    nonfinite: Tensor

    @classmethod
    def zeros(cls, num_rows: int, width: int, device: torch.device) -> "GradientTotals":
        """Return the totals of nothing."""
        return cls(
            torch.zeros(num_rows, width, device=device, dtype=torch.float32),
            torch.zeros(num_rows, device=device, dtype=torch.float64),
            torch.zeros(num_rows, device=device, dtype=torch.float32),
            torch.zeros(num_rows, device=device, dtype=torch.int64),
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them, in the order of the attributes; their memory stays where it is."""
        return self.sketches, self.squared_norms, self.largest, self.nonfinite

    def reset(self) -> None:
        """Set all totals to those of nothing, in place."""
        for tensor in self.tensors:
            tensor.zero_()

    def add(self, other: "GradientTotals") -> None:
        """Add the totals of other elements, in place."""
        self.sketches.add_(other.sketches)
        self.squared_norms.add_(other.squared_norms)
        torch.maximum(self.largest, other.largest, out=self.largest)
        self.nonfinite.add_(other.nonfinite)

    def divide(self, divisor: float) -> None:
        """Make them the totals of gradients that were divided by a number, in place."""
        if divisor != 1.0:
            self.sketches.div_(divisor)
            self.squared_norms.div_(divisor**2)
            self.largest.div_(divisor)

    def clone(self) -> "GradientTotals":
        """Return a copy that later measurements leave alone."""
        return GradientTotals(*(tensor.clone() for tensor in self.tensors))
