"""Micro-batches: gradients that are never seen whole, and norms of those that grow.

:class:`GradientParts` measures a gradient's parts one by one, as they pass.

Where each micro-batch's gradient is sent away as soon as it exists (ZeRO 2 and 3), the accumulated
local gradient ``g = sum_m g_m`` is never in memory. Sketches add up over its parts, squared norms
do not: they lack the inner products of different parts, which the sketches estimate:

    |g|^2  =  sum_m |g_m|^2  +  sum_{m != n} g_m . g_n
           ~  sum_m |g_m|^2  +  |sum_m S_m|^2  -  sum_m |S_m|^2

This is unbiased, exact for a single part, and its relative RMS error is at most about ``sqrt(2/k)``
unless parts oppose each other. ``|sum_m S_m|^2`` alone would do too, with a larger error (by
``sqrt(2)`` for two independent parts): here the norms of the parts are exact.

:class:`MicroBatches` finds the norms of micro-batches in a gradient that grows with each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.tap import LocalGradient, ReadReduced


class GradientParts:
    """Totals of a gradient that arrives in parts; each holds a parameter once."""

    def __init__(self, sketcher: Sketcher) -> None:
        self._sketcher = sketcher
        self._part = sketcher.new_totals()
        self._sum: GradientTotals | None = None  # of all parts but the last, where there are more
        self._seen: set[str] = set()  # in the part that is open
        self.count = 0  # of closed parts, the one in ``_part`` among them if nothing is open
        self._closed = False  # the part in ``_part``
        self._squared_norms: list[Tensor] = []  # of parts in the sum
        self._squared_sketches: Tensor | None = None

    def measure(self, name: str, gradient: Tensor) -> None:
        """Add a parameter's gradient to the open part; one that is already in it opens another."""
        self.measure_many([(name, gradient)])

    def measure_many(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Add several parameters' gradients to the open part.

        If one is already in it, all of them open another.
        """
        names = [name for name, _ in gradients]
        if not self._seen.isdisjoint(names):
            self.close()
        if self._closed:
            self._put_away()
        self._seen.update(names)
        self._sketcher.measure_many(
            [(name, gradient, 0) for name, gradient in gradients], self._part
        )

    def close(self) -> None:
        """End the open part, and begin another one."""
        if self._closed:  # an empty one
            self._put_away()
        self._seen.clear()
        self._closed = True
        self.count += 1

    def add(self, part: GradientTotals) -> None:
        """Add a whole part that was measured elsewhere, and close it."""
        self._add(part)
        self.count += 1

    def reset(self) -> None:
        """Forget all parts."""
        self._seen.clear()
        self._squared_norms.clear()
        self._sum = self._squared_sketches = None
        self._closed = False
        self.count = 0
        self._part.reset()

    def totals(self) -> GradientTotals:
        """Return a copy of the totals of the sum of all closed parts.

        With more than one part, ``squared_norms`` are estimates; ``largest`` is the largest
        magnitude in any part, ``nonfinite`` the count over all parts.
        """
        if self.count == 0:
            return self._sketcher.new_totals()
        if self.count > 1 and self._closed:
            self._put_away()
        if self._sum is None:
            return self._part.clone()
        totals = self._sum.clone()
        if self.count > 1 and self._squared_sketches is not None:
            cross_terms = _squared_norms(totals.sketches) - self._squared_sketches
            totals.squared_norms.add_(cross_terms).clamp_(min=0.0)
        return totals

    @property
    def adds_up(self) -> bool:
        """Whether the totals are those of the sum: norms alone do not add up over parts."""
        return self._sketcher.sketches or self.count == 1

    @property
    def estimated(self) -> bool:
        """Whether the squared norms of the totals are estimates."""
        return self.count > 1

    def part_squared_norms(self, num_passes: int) -> Tensor | None:
        """Return float64 ``[M]``: the exact squared norm of each closed part.

        None with a single one, and unless each of so many backward passes was one.
        """
        if not 1 < self.count == num_passes:
            return None
        if self._closed:
            self._put_away()
        return torch.stack(self._squared_norms)

    def _put_away(self) -> None:
        """Add the closed part to the sum; a single part needs none of these operations."""
        self._add(self._part)
        self._part.reset()
        self._closed = False

    def _add(self, part: GradientTotals) -> None:
        squared_sketches = _squared_norms(part.sketches)
        self._squared_norms.append(part.squared_norms.sum())
        if self._sum is None or self._squared_sketches is None:
            self._sum = part.clone()
            self._squared_sketches = squared_sketches
        else:
            self._sum.add(part)
            self._squared_sketches.add_(squared_sketches)


def _squared_norms(sketches: Tensor) -> Tensor:
    return sketches.double().square().sum(1)


class MicroBatches:
    """The squared norms of single micro-batches, from sums that grow with each of them."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._squared_norms: list[Tensor] = []

    def reset(self) -> None:
        """Begin a new step."""
        self._before = None
        self._squared_norms.clear()

    def add(self, totals: GradientTotals, *, last: bool) -> None:
        """Add a micro-batch, given the totals of the gradient accumulated so far."""
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


Watcher = Callable[[Tensor, Tensor], None]
"""Gets a parameter and its gradient in one micro-batch, before that is taken away."""


@dataclass(slots=True)
class MicroBatchStream:
    """A model's gradients as they come, one micro-batch at a time."""

    factor: float  # of the reduced gradient over the workers' mean: W for a sum, else 1
    watchers: list[Watcher] = field(default_factory=list)  # which must not raise

    def pass_on(self, parameter: Tensor, gradient: Tensor) -> None:
        """Pass a gradient to all watchers."""
        for see in tuple(self.watchers):
            see(parameter, gradient)


streams: "WeakKeyDictionary[nn.Module, MicroBatchStream]" = WeakKeyDictionary()
"""The streams of wrapped models whose gradients are taken away one by one."""


class StreamReader:
    """Measures gradients that come one by one."""

    def __init__(self, stream: MicroBatchStream, sketcher: Sketcher) -> None:
        self.parts = GradientParts(sketcher)
        self._stream = stream
        self._num_passes = 0
        self._see: Watcher | None = None

    def watch(self, see: Watcher) -> None:
        """Call a function with each gradient from now on."""
        self._see = see
        self._stream.watchers.append(see)

    def remove(self) -> None:
        """Watch no more."""
        if self._see in self._stream.watchers:
            self._stream.watchers.remove(self._see)

    def reset(self) -> None:
        """Begin a new step."""
        self.parts.reset()
        self._num_passes = 0

    def end_pass(self) -> None:
        """Close a micro-batch."""
        self.parts.close()
        self._num_passes += 1

    def gradient(
        self, reduced: GradientTotals | None, carried_over: Tensor | None
    ) -> LocalGradient:
        """Return the step's measurements; ``reduced`` is scaled in place to the workers' mean."""
        if reduced is not None:
            reduced.scale(1 / self._stream.factor)
        return LocalGradient(
            self.parts.totals(),
            reduced,
            self.parts.part_squared_norms(self._num_passes),
            carried_over,
            norm_estimated=self.parts.estimated,
        )


def measure_reduced_parts(
    sketcher: Sketcher, read: ReadReduced, parts: Sequence[Measured], into: GradientTotals
) -> None:
    """Measure the parts of the reduced gradient that a rank holds, or their norms alone."""
    into.reset()
    if read is ReadReduced.NORM:
        sketcher.measure_norms([(name, part) for name, part, _ in parts], into)
    else:
        sketcher.measure_many(parts, into)
