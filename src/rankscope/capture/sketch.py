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

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rankscope.capture.kernels import PERIOD, ParameterSigns, choose_kernel, period_signs
from rankscope.capture.kernels.flat import flat_parts
from rankscope.capture.kernels.native import NativeKernel, NativePlace, reads
from rankscope.capture.totals import GradientTotals
from rankscope.core.groups import Groups
from rankscope.core.sections import Range, Sections
from rankscope.errors import UnsupportedError, UsageError

DEFAULT_WIDTH = 4093

_NONE: Mapping[str, NativePlace] = MappingProxyType({})


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
        self._native = self._kernel if isinstance(self._kernel, NativeKernel) else None
        self._signs: dict[str, ParameterSigns] = {}
        self._places: WeakKeyDictionary[GradientTotals, dict[str, NativePlace]]
        self._places = WeakKeyDictionary()

    @property
    def kernel(self) -> str:
        """What does the work: ``torch``, ``native`` or ``triton``, the fastest that works here."""
        return self._kernel.name

    def new_totals(self) -> GradientTotals:
        """Return totals of nothing, to be filled by :meth:`measure`."""
        return GradientTotals.zeros(self._num_rows, self.width, self.device)

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

        Raises:
            UnsupportedError: It lives elsewhere, or the training has freed its memory.
        """
        place = self._places.get(into, _NONE).get(name)
        if place is None or not place.measure(gradient, start):
            self._measure_parts(name, gradient, into, start)
            self._prepare(name, gradient, into, start)

    @torch.no_grad()
    def measure_norm(self, name: str, gradient: Tensor, into: GradientTotals) -> None:
        """Add a gradient's squared norm, largest magnitude and non-finite count; no sketch."""
        self._check_device(gradient)
        for _, flat in flat_parts(gradient):
            self._kernel.measure_norm(flat, into, self._norm_row(name))

    def measure_norms(self, gradients: Iterable[tuple[str, Tensor]], into: GradientTotals) -> None:
        """Do what :meth:`measure_norm` does with several parameters, one after the other."""
        native = self._native
        for at_once, several in groupby(gradients, self._is_read):
            if native is not None and at_once:
                native.measure_norms([(g, self._norm_row(name)) for name, g in several], into)
            else:
                for name, gradient in several:
                    self.measure_norm(name, gradient, into)

    def _is_read(self, named: tuple[str, Tensor]) -> bool:
        """Return whether the native kernel reads a gradient as it is."""
        return self._native is not None and reads(named[1])

    @torch.no_grad()
    def _measure_parts(self, name: str, gradient: Tensor, into: GradientTotals, start: int) -> None:
        """Measure a gradient of any kind."""
        self._check_device(gradient)
        signs = self._signs_of(name)
        first = signs.first % self.width
        for position, flat in flat_parts(gradient):
            for row, place, piece in self._pieces(name, flat, start + position):
                self._kernel.measure(piece, signs, first + place, into, row)

    def _check_device(self, gradient: Tensor) -> None:
        if gradient.device != self.device:
            raise UnsupportedError(
                f"expected a gradient on {self.device}, where this worker's others are, got one "
                f"on {gradient.device}; a model that is split over devices cannot be watched yet"
            )

    def _prepare(self, name: str, gradient: Tensor, into: GradientTotals, start: int) -> None:
        """Have later gradients like this one measured with fewer steps, if there are such steps."""
        native, ranges = self._native, self._ranges[name]
        if native is None or len(ranges) > 1 or not reads(gradient):
            return
        places = self._places.setdefault(into, {})
        if name not in places or places[name].start == start:
            places[name] = self._new_place(native, name, gradient.numel(), into, start)

    def _new_place(
        self, native: NativeKernel, name: str, size: int, into: GradientTotals, start: int
    ) -> NativePlace:
        row = self._ranges[name][0].section
        return native.place(self._signs_of(name), start, into, row, size)

    def _norm_row(self, name: str) -> int:
        """Return the row for a parameter's norm: norms are told of groups at the most."""
        return self._ranges[name][0].section

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
