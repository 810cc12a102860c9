"""Norms of single micro-batches, told from a gradient that grows with each of them."""

import torch
from torch import Tensor

from rankscope.capture.totals import GradientTotals


class MicroBatches:
    """The squared norms of single micro-batches, told from sums that grow with each of them."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._squared_norms: list[Tensor] = []

    def reset(self) -> None:
        """Begin a new step."""
        self._before = None
        self._squared_norms.clear()

    def add(self, totals: GradientTotals, *, last: bool) -> None:
        """Take the totals of the gradient accumulated so far."""
        if last and self._before is None:
            return  # a single micro-batch
        sketch = totals.sketches.sum(0)
        if self._before is None:
            self._squared_norms.append(totals.squared_norms.sum())
        else:
            self._squared_norms.append((sketch - self._before).double().square().sum())
        self._before = sketch

    def squared_norms(self) -> Tensor | None:
        """Return one per micro-batch ``[M]``, float64; None when there was a single one.

        All but the first are squared norms of sketches: unbiased, with an RMS error of sqrt(2/k).
        """
        return torch.stack(self._squared_norms) if self._squared_norms else None
