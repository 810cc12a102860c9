"""A gradient that is never seen whole: its parts are measured one by one, as they pass.

Where each micro-batch's gradient is sent away as soon as it exists (ZeRO 2 and 3), the accumulated
local gradient ``g = sum_m g_m`` is never in memory. Sketches add up over its parts, squared norms
do not. What is missing are the inner products of different parts, which the sketches estimate:

    |g|^2  =  sum_m |g_m|^2  +  sum_{m != n} g_m . g_n
           ~  sum_m |g_m|^2  +  |sum_m S_m|^2  -  sum_m |S_m|^2

This is unbiased, exact for a single part, and its relative RMS error is at most about ``sqrt(2/k)``
unless parts oppose each other. ``|sum_m S_m|^2`` alone would do too, with a larger error (by
``sqrt(2)`` for two independent parts): here the norms of the parts are exact.
"""

import torch
from torch import Tensor

from rankscope.capture.sketch import Sketcher
from rankscope.capture.totals import GradientTotals


class GradientParts:
    """Totals of a gradient that arrives in parts; each holds a parameter once.

    Args:
        sketcher: Measures the parts.
    """

    def __init__(self, sketcher: Sketcher) -> None:
        self._sketcher = sketcher
        self._part = sketcher.new_totals()
        self._sum = sketcher.new_totals()
        self._seen: set[str] = set()  # in the part that is open
        self._squared_norms: list[Tensor] = []
        self._squared_sketches = torch.zeros_like(self._sum.squared_norms)

    @property
    def count(self) -> int:
        """How many parts have been closed."""
        return len(self._squared_norms)

    def measure(self, name: str, gradient: Tensor) -> None:
        """Add a parameter's gradient to the open part; one that is already in it opens another."""
        if name in self._seen:
            self.close()
        self._seen.add(name)
        self._sketcher.measure(name, gradient, self._part)

    def close(self) -> None:
        """End the open part; what follows belongs to another one."""
        self._seen.clear()
        self._squared_norms.append(self._part.squared_norms.sum())
        self._squared_sketches.add_(_squared_norms(self._part.sketches))
        self._sum.add(self._part)
        self._part.reset()

    def reset(self) -> None:
        """Forget all parts."""
        self._seen.clear()
        self._squared_norms.clear()
        self._squared_sketches.zero_()
        self._part.reset()
        self._sum.reset()

    def totals(self) -> GradientTotals:
        """Return the totals of the sum of all closed parts.

        Returns:
            A copy. With more than one part, ``squared_norms`` are estimates, and ``largest`` and
            ``nonfinite`` tell of the parts: the largest magnitude in any of them, and how many of
            their elements are not finite.
        """
        totals = self._sum.clone()
        if self.count > 1:
            cross_terms = _squared_norms(totals.sketches) - self._squared_sketches
            totals.squared_norms.add_(cross_terms).clamp_(min=0.0)
        return totals

    def part_squared_norms(self) -> Tensor:
        """Return float64 ``[M]``: the exact squared norm of each closed part."""
        return torch.stack(self._squared_norms)


def _squared_norms(sketches: Tensor) -> Tensor:
    return sketches.double().square().sum(1)
