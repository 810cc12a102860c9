"""What a pass over gradients leaves behind: a few numbers and a short sketch for each group."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradientTotals:
    """Running totals of gradients, one row per group of parameters, all on one device.

    The total over groups is a sum (of ``largest``, a maximum): everything here is linear or
    monotone, so that parts can be measured in any order.

    Attributes:
        sketches: float32 ``[G, k]``: linear sketch of each group's gradient.
        squared_norms: float64 ``[G]``: sum of squares; infinite or NaN where an element is.
        largest: float32 ``[G]``: largest magnitude; infinite or NaN where an element is.
        nonfinite: int64 ``[G]``: how many elements are infinite or NaN.
    """

    sketches: Tensor
    squared_norms: Tensor
    largest: Tensor
    nonfinite: Tensor

    @classmethod
    def zeros(cls, num_groups: int, width: int, device: torch.device) -> "GradientTotals":
        """Return the totals of nothing."""
        return cls(
            torch.zeros(num_groups, width, device=device),
            torch.zeros(num_groups, device=device, dtype=torch.float64),
            torch.zeros(num_groups, device=device),
            torch.zeros(num_groups, device=device, dtype=torch.int64),
        )

    def reset(self) -> None:
        """Set all totals to those of nothing, in place."""
        for field in fields(self):
            getattr(self, field.name).zero_()

    def add(self, other: "GradientTotals") -> None:
        """Add the totals of other elements, in place."""
        self.sketches.add_(other.sketches)
        self.squared_norms.add_(other.squared_norms)
        torch.maximum(self.largest, other.largest, out=self.largest)
        self.nonfinite.add_(other.nonfinite)

    def clone(self) -> "GradientTotals":
        """Return a copy that later measurements leave alone."""
        return GradientTotals(*(getattr(self, field.name).clone() for field in fields(self)))
