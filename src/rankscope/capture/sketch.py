"""One pass over a gradient that yields its squared norm and a short linear sketch.

The sketch S is a count sketch of prime width k. Element e of a parameter lies at position
q = e + first; with c = q mod k and r = q div k it is added to S[c] with the sign

    row_sign[r] * period_sign[(q + shift) mod p],

where first, shift and the row signs are drawn for each parameter from the seed and its name, and
the period signs have the prime length p = 8,191. One sign per row alone would let structured
gradients (constant, positive activations, sparse rows) through with errors ten times as large;
the product of the two coprime periods does not (docs/metrics.md has the table).

S is linear, so the sketch of a sum is the sum of sketches, and ``S(g).S(h)`` estimates ``g.h``
with variance of order ``|g|^2 |h|^2 / k``. Signs depend on nothing but seed, name and index: they
agree between workers, devices, kernels, steps, bucket rebuilds and restarts.

Source of the method: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams"
(2002).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankscope.capture.kernels import PERIOD, ParameterSigns, choose_kernel, period_signs
from rankscope.capture.kernels.flat import flat_parts
from rankscope.capture.totals import GradientTotals
from rankscope.core.groups import Groups
from rankscope.core.sections import Range, Sections
from rankscope.errors import UsageError

DEFAULT_WIDTH = 4093


class Sketcher:
    """Measures gradients on one device, without a copy in proportion to their size.

    Args:
        device: Where the gradients live.
        groups: The parameters that will be measured, and their groups.
        width: Sketch width k, a prime other than 8,191; the RMS error of a cosine is about
            ``(1 - cos^2)/sqrt(k)``.
        seed: Seed of all signs; equal on workers that are compared.
        sections: Where groups are cut for the audit of the reduction: totals then have a row for
            each section. None: one for each group.

    Raises:
        UsageError: ``width`` is not such a prime.
    """

    sketches = True
    """Whether :meth:`measure` fills sketches, or norms alone."""

    def __init__(
        self,
        device: torch.device,
        groups: Groups,
        width: int = DEFAULT_WIDTH,
        seed: int = 0,
        sections: Sections | None = None,
    ) -> None:
        if not _is_prime(width) or width == PERIOD:
            raise UsageError(
                f"sketch_width must be a prime other than {PERIOD}, got {width}; "
                f"try {DEFAULT_WIDTH}"
            )
        self.device = device
        self.groups = groups
        self.width = width
        self.seed = seed
        self._ranges = _whole(groups) if sections is None else dict(sections.ranges)
        self._num_rows = len(groups) if sections is None else len(sections)
        self._kernel = choose_kernel(device, width, period_signs(seed))
        self._signs: dict[str, ParameterSigns] = {}

    @property
    def kernel(self) -> str:
        """What does the work: ``torch``, ``native`` or ``triton``, the fastest that works here."""
        return self._kernel.name

    def new_totals(self) -> GradientTotals:
        """Return totals of nothing, to be filled by :meth:`measure`."""
        return GradientTotals.zeros(self._num_rows, self.width, self.device)

    @torch.no_grad()
    def measure(self, name: str, gradient: Tensor, into: GradientTotals, *, start: int = 0) -> None:
        """Add one parameter's gradient, or a contiguous part of it, to the totals of its group.

        Where groups are cut into sections, to those of the sections that it lies in.

        Calls on one accelerator must follow one another on its stream: they share scratch space.

        Args:
            name: The parameter's name, which selects the rows and the signs.
            gradient: Any shape, any floating dtype, on this sketcher's device; a DTensor counts
                as its local part.
            into: The totals to add to.
            start: Position of the gradient's first element in the whole flat parameter.
        """
        signs = self._signs_of(name)
        first = signs.first % self.width
        for position, flat in flat_parts(gradient):
            for row, place, piece in self._pieces(name, flat, start + position):
                self._kernel.measure(piece, signs, first + place, into, row)

    @torch.no_grad()
    def measure_norm(self, name: str, gradient: Tensor, into: GradientTotals) -> None:
        """Add a gradient's squared norm, largest magnitude and non-finite count; no sketch."""
        for _, flat in flat_parts(gradient):  # norms are told of groups at the most
            self._kernel.measure_norm(flat, into, self._ranges[name][0].section)

    def _pieces(self, name: str, flat: Tensor, start: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield row, position in the parameter and elements of each piece of a flat part."""
        *before, last = self._ranges[name]
        for row, begin, end in before:
            low, high = max(begin - start, 0), min(end - start, len(flat))
            if low < high:
                yield row, start + low, flat[low:high]
        low = max(last.start - start, 0)
        if low < len(flat):
            yield last.section, start + low, flat[low:] if low else flat

    def _signs_of(self, name: str) -> ParameterSigns:
        signs = self._signs.get(name)
        if signs is None:
            signs = self._signs[name] = ParameterSigns(name, self.seed, self.device)
        return signs


def _whole(groups: Groups) -> dict[str, tuple[Range, ...]]:
    """Return ranges that leave parameters whole, one section for each group."""
    return {name: (Range(group, 0, 0),) for name, group in groups.index_of.items()}


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
