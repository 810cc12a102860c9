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

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rankscope.bus.groups import Groups, Range, Sections
from rankscope.errors import UsageError
from rankscope.gradients.kernels import PERIOD, ParameterSigns, choose_kernel, period_signs
from rankscope.gradients.multi_tensor import Cut, MultiTensorReader, TensorSource
from rankscope.gradients.totals import GradientTotals

DEFAULT_WIDTH = 4093

Measured = tuple[str, Tensor, int]
"""A parameter's name, its gradient or a contiguous part of it, and where in it that begins."""

_MOST_PREPARED = 4096  # sets of gradients that are measured together
_HEAD = "the first elements of any"  # no parameter's name: it has spaces
_WHOLE = "all elements of any"
_LOOKED_AT = 64  # elements of each gradient that show whether it was zeroed


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
        self._group_of: Tensor | None = None  # each row
        if self._num_rows != len(groups) and sections is not None:
            self._group_of = torch.tensor(sections.group_of, device=device)
        self._kernel = choose_kernel(device, width, period_signs(seed))
        self._signs: dict[str, ParameterSigns] = {}
        self._readers: dict[tuple[Sequence[str], Sequence[int], bool], MultiTensorReader] = {}
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return the seconds of reading gradients on the calling thread since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def kernel(self) -> str:
        """The kernel's name: ``torch``, ``native`` or ``triton``, the fastest that works here."""
        return self._kernel.name

    def new_totals(self) -> GradientTotals:
        """Return totals of nothing, to be filled by :meth:`measure`."""
        return GradientTotals.zeros(self._num_rows, self.width, self.device)

    def by_group(self, values: Tensor) -> Tensor:
        """Return sums over the rows of each group, of one number for each row of totals."""
        if self._group_of is None:
            return values
        return values.new_zeros(len(self.groups)).index_add_(0, self._group_of, values)

    def measure(self, name: str, gradient: Tensor, into: GradientTotals, *, start: int = 0) -> None:
        """Add one parameter's gradient, or a contiguous part of it: see :meth:`measure_many`."""
        self.measure_many(((name, gradient, start),), into)

    def measure_many(self, gradients: Sequence[Measured], into: GradientTotals) -> None:
        """Add gradients to the totals of their groups.

        Where groups are cut into sections, to those of the sections that they lie in. However many
        they are, it takes one call of a compiled function, or two launches for each type of
        element on an accelerator that has a kernel of its own; all is prepared in the first call
        with the same parameters. Gradients of other types and layouts are added one by one.

        Calls on one accelerator must follow one another on its stream: they share scratch space.

        Args:
            gradients: For each the parameter's name, which selects the rows and the signs; the
                gradient, of any shape and any floating dtype, on this sketcher's device (a DTensor
                counts as its local part); and the position of its first element in the whole flat
                parameter.
            into: The totals to add to.

        Raises:
            UnsupportedError: One lives elsewhere, or the training has freed its memory.
        """
        if gradients:
            names, tensors, starts = zip(*gradients, strict=True)
            self._measure(names, tensors, starts, into, sketching=self.sketches)

    def measure_whole(
        self,
        names: tuple[str, ...],
        gradients: Sequence[Tensor],
        into: GradientTotals,
        *,
        again: bool = False,
    ) -> None:
        """Add the whole gradients of some parameters; see :meth:`measure_many`.

        Args:
            names: The parameters.
            gradients: Of each.
            into: The totals to add to.
            again: Whether these are the very tensors of the last call with these names, of which
                nothing but the content can have changed.
        """
        if names:
            starts = (0,) * len(names)
            self._measure(names, gradients, starts, into, sketching=self.sketches, again=again)

    def measure_norms(self, gradients: Iterable[tuple[str, Tensor]], into: GradientTotals) -> None:
        """Add squared norms, largest magnitudes and non-finite counts; no sketch.

        Where groups are cut into sections, all of a parameter counts to its first one.
        """
        named = tuple(gradients)
        if named:
            names, tensors = zip(*named, strict=True)
            self._measure(names, tensors, (0,) * len(names), into, sketching=False)

    def holds_any(self, gradients: Sequence[Tensor], *, whole: bool = False) -> Tensor | None:
        """Return whether any gradient holds something, going by its first elements.

        Args:
            gradients: Any shapes and layouts, on this sketcher's device.
            whole: Whether to go by all of its elements: the first rows of an embedding, say, may
                belong to tokens that are rare.

        Returns:
            Boolean scalar tensor; None without gradients.
        """
        if not gradients:
            return None
        totals = GradientTotals.zeros(1, self.width, self.device)
        if whole:
            self._measure(
                (_WHOLE,) * len(gradients),
                gradients,
                (0,) * len(gradients),
                totals,
                sketching=False,
            )
            return totals.largest[0] != 0
        heads = tuple(g if g.is_contiguous() and not g.is_sparse else _head(g) for g in gradients)
        self._measure((_HEAD,) * len(heads), heads, (0,) * len(heads), totals, sketching=False)
        return totals.largest[0] != 0

    def _measure(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        starts: Sequence[int],
        into: GradientTotals,
        *,
        sketching: bool,
        again: bool = False,
    ) -> None:
        begun = time.perf_counter()
        key = (names, starts, sketching)
        reader = self._readers.get(key)
        if reader is None or not (again or reader.fits(gradients)):
            if len(self._readers) >= _MOST_PREPARED:
                self._readers.clear()
            sources = [
                self._source(name, start, sketching=sketching)
                for name, start in zip(names, starts, strict=True)
            ]
            reader = MultiTensorReader(
                self._kernel, self.device, gradients, sources, sketching=sketching
            )
            self._readers[key] = reader
        reader.measure(gradients, into)
        self._seconds += time.perf_counter() - begun

    def _source(self, name: str, start: int, *, sketching: bool) -> TensorSource:
        """Return where the elements of a gradient belong that begins at ``start``."""
        if name == _HEAD:
            return TensorSource(_head_cuts, None)
        if name == _WHOLE:
            return TensorSource(lambda _, count: _whole_cuts(0, count), None)
        if not sketching:  # all of a parameter counts to its first section
            row = self._ranges[name][0].section
            return TensorSource(lambda _, count: _whole_cuts(row, count), None)
        signs = self._signs_of(name)
        ranges = self._ranges[name]
        first = signs.first % self.width
        return TensorSource(lambda at, count: _cuts(ranges, start + at, count, first), signs)

    def _signs_of(self, name: str) -> ParameterSigns:
        signs = self._signs.get(name)
        if signs is None:
            signs = self._signs[name] = ParameterSigns(name, self.seed, self.device)
        return signs


class NormMeter(Sketcher):
    """A :class:`Sketcher` that leaves all sketches zero, for the tier without them."""

    sketches = False


def _cuts(ranges: Sequence[Range], start: int, count: int, first: int) -> Iterator[Cut]:
    """Cut elements where sections end; what lies beyond the last belongs to it.

    Args:
        ranges: Of the parameter.
        start: Position of the first element in it.
        count: Number of elements.
        first: Position of the parameter's own first element, for a kernel.
    """
    *before, last = ranges
    for row, begin, end in (*before, Range(last.section, last.start, start + count)):
        low = max(begin - start, 0)
        high = min(end - start, count)
        if low < high:
            yield Cut(row, low, high, first + start + low)


def _whole_cuts(row: int, count: int) -> list[Cut]:
    return [Cut(row, 0, count, 0)] if count else []


def _head_cuts(start: int, count: int) -> list[Cut]:
    return _whole_cuts(0, min(count, _LOOKED_AT)) if start == 0 else []


def _head(gradient: Tensor) -> Tensor:
    """Return the first elements of a gradient, without a copy."""
    head = gradient.detach()
    if head.is_sparse:
        head = head._values()
    while head.dim() > 1 and head.numel():
        head = head[0]
    return head.reshape(-1)[:_LOOKED_AT]


def _whole(groups: Groups) -> dict[str, tuple[Range, ...]]:
    """Return ranges that leave parameters whole, one section for each group."""
    return {name: (Range(group, 0, 0),) for name, group in groups.index_of.items()}


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
