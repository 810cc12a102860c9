"""Whether a gradient is left alone from one micro-batch's backward pass to the next.

A backward pass adds the difference of two readings to the accumulated gradient: after it and
before it. A reading after each pass alone hides what happens in between: a ``zero_grad`` in the
wrong place looks like a gradient. So where a step has more than one micro-batch, the squared norms
after a pass are compared with those before the next one: one more read of the gradient for each
micro-batch after the first. If nothing has changed in between, and nothing was there before the
first pass, the sum of the passes' gradients enters the reduction.

Legend of shapes: B pairs of consecutive passes, G groups of parameters.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals

_version_of = attrgetter("_version")

ReadAgain = Callable[[GradientTotals], None]
"""Adds the present norms of the gradients that a pass has left to totals."""


class AccumulatorAudit:
    """Compares the gradient before each backward pass of a step with that after the last one.

    Two passes between which the parameters themselves have changed are not compared: they belong
    to two gradients, as in sharpness-aware minimisation. Nor are passes that reach parameters
    before the model's output: then the gradient before the pass is not seen in time.
    """

    def __init__(self, parameters: Mapping[str, Tensor], sketcher: Sketcher) -> None:
        self._parameters = parameters
        self._sketcher = sketcher
        self._all = tuple(parameters)
        self._every = list(parameters.values())
        self._totals: GradientTotals | None = None  # before the pass that runs
        self._read_again: ReadAgain | None = None  # the gradient of the last pass
        self._versions: list[int] = []
        self._squares: list[Tensor] = []  # of each pair ``[2, G]``; NaN where unknown
        self._pair: Tensor | None = None  # of the pass that runs
        self._passes = 0
        self._open = False  # whether the pass that runs was read
        self._too_late = False

    def reset(self) -> None:
        """Begin a step."""
        self._read_again = None
        self._pair = None
        self._open = False
        self._passes = 0
        self._squares.clear()

    def begin_pass(
        self,
        before: GradientTotals,  # after the last pass
        *,
        measure: bool,
        begun: bool,  # it has reached a parameter already
    ) -> None:
        """Measure the gradient, as soon as a backward pass has reached the model's output."""
        if self._open:
            return
        self._open = True
        self._too_late |= begun
        if self._read_again is None or not measure or self._too_late:
            return
        if self._versions != self._now():
            return
        if self._totals is None:
            self._totals = self._sketcher.new_totals()
        self._totals.reset()
        self._read_again(self._totals)
        by_group = self._sketcher.by_group
        pair = by_group(before.squared_norms), by_group(self._totals.squared_norms)
        self._pair = torch.stack(pair)

    def drop_pass(self) -> None:
        """Forget the pass, as where the training wanted gradients of other tensors."""
        self._open = False
        self._pair = None

    def reading(self, names: Collection[str]) -> ReadAgain | None:
        """Return a function that reads ``.grad`` of some parameters again; None without names."""
        whole = len(names) == len(self._all)
        left = self._all if whole else tuple(n for n in self._all if n in names)
        return partial(self._read_gradients, left) if left else None

    def end_pass(
        self,
        read_again: ReadAgain | None,  # of the gradient, if it was measured and waits for more
        *,
        again: bool = False,  # its end was noted before: only now its gradients were reduced
    ) -> None:
        """Note that a backward pass has ended."""
        if not again:
            self._count_pass()
        self._read_again = None
        if read_again is not None and not self._too_late:
            self._read_again = read_again
            self._versions = self._now()

    def _count_pass(self) -> None:
        pair = self._pair
        self._pair = None
        self._open = False
        if pair is not None:
            skipped = self._passes - 1 - len(self._squares)
            self._squares += [torch.full_like(pair, torch.nan)] * skipped
            self._squares.append(pair)
        self._passes += 1

    def _read_gradients(self, names: Sequence[str], into: GradientTotals) -> None:
        gradients = [(name, self._parameters[name].grad) for name in names]
        there = [(name, gradient) for name, gradient in gradients if gradient is not None]
        self._sketcher.measure_norms(there, into)

    def _now(self) -> list[int]:
        return list(map(_version_of, self._every))

    def collect(self) -> Tensor | None:
        """Return the changes between the step's passes; None with a single micro-batch.

        float64 ``[2 B + G]``: squared norms after a pass, and before the next one, of each pair up
        to the last known one; then the largest relative change of each group's norm, NaN where this
        worker holds nothing of it.
        """
        if not self._squares:
            return None
        squares_B2G = torch.stack(self._squares)
        left_BG, found_BG = squares_B2G.sqrt().unbind(1)
        change_BG = (found_BG - left_BG).abs() / torch.maximum(left_BG, found_BG)
        changes_G = change_BG.nan_to_num(nan=-1.0).amax(0)
        changes_G = changes_G.masked_fill(changes_G < 0, torch.nan)
        return torch.cat([squares_B2G.sum(2).flatten(), changes_G])
