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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.bus.groups import Groups, Range, Sections
from rankscope.errors import UnsupportedError, UsageError
from rankscope.gradients.kernels import choose_kernel
from rankscope.gradients.kernels.flat import check_memory, flat_parts
from rankscope.gradients.kernels.interface import (
    PERIOD,
    Kernel,
    ParameterSigns,
    Piece,
    period_signs,
)
from rankscope.gradients.totals import GradientTotals

DEFAULT_WIDTH = 4093

Measured = tuple[str, Tensor, int]
"""A parameter's name, its gradient or a contiguous part of it, and where in it that begins."""

_MOST_PREPARED = 4096  # sets of gradients that are measured together
_HEAD = "the first elements of any"  # no parameter's name: it has spaces
_WHOLE = "all elements of any"
_LOOKED_AT = 64  # elements of each gradient that show whether it was zeroed
_FLAT_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

_LOW = 1 << 40
"""Lower addresses lie in freed memory: they count from zero."""

_look_on_host = attrgetter("dtype", "layout", "is_cpu")
_look_on_device = attrgetter("dtype", "layout", "device")


class Cut(NamedTuple):
    """Consecutive elements ``[low, high)`` of a part of a gradient, and their row of the totals.

    ``start`` is the position of the first in the whole flat parameter, as a kernel counts.
    """

    row: int
    low: int
    high: int
    start: int


class TensorSource(NamedTuple):
    """Where the elements of one gradient belong.

    ``cuts`` cuts a part of it, given the position of its first element and their number. ``signs``
    are None where norms alone are measured.
    """

    cuts: Callable[[int, int], Iterable[Cut]]
    signs: ParameterSigns | None


class MultiTensorReader:
    """Measures gradients of which nothing but their memory changes from call to call.

    Those in the layout of the kernel are prepared for it, and measured in one call; all others one
    by one. A gradient that lives on another device than the kernel's is an UnsupportedError.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: torch.device,
        gradients: Sequence[Tensor],
        sources: Sequence[TensorSource],
        *,
        sketching: bool,
    ) -> None:
        self._kernel = kernel
        self._sources = sources
        self._look = _look_on_host if device.type == "cpu" else _look_on_device
        self._form = self._form_of(gradients)
        for gradient in gradients:
            if gradient.device != device:
                raise UnsupportedError(
                    f"expected a gradient on {device}, where this worker's others are, got one on "
                    f"{gradient.device}; a model that is split over devices cannot be watched yet"
                )
        flat = [number for number, gradient in enumerate(gradients) if _is_flat(gradient)]
        self._flat = flat
        self._others = sorted(set(range(len(gradients))) - set(flat))
        pieces = [
            Piece(source, cut.low, cut.high - cut.low, gradients[number].dtype, cut.row,
                  sources[number].signs, cut.start)
            for source, number in enumerate(flat)
            for cut in sources[number].cuts(0, gradients[number].numel())
        ]  # fmt: skip
        self._prepared = kernel.prepare(pieces, sketching=sketching) if pieces else None

    def fits(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether gradients are like those that were prepared."""
        return self._form_of(gradients) == self._form

    def measure(self, gradients: Sequence[Tensor], into: GradientTotals) -> None:
        """Add gradients that fit to totals; UnsupportedError where one's memory is freed."""
        flat = [gradients[number] for number in self._flat] if self._others else gradients
        pointers = list(map(Tensor.data_ptr, flat))
        if pointers and min(pointers) < _LOW:
            for gradient, pointer in zip(flat, pointers, strict=True):
                if pointer < _LOW:
                    check_memory(gradient)
        if self._prepared is not None:
            self._prepared.measure(flat, pointers, into)
        for number in self._others:
            self._measure_alone(gradients[number], self._sources[number], into)

    @torch.no_grad()
    def _measure_alone(self, gradient: Tensor, source: TensorSource, into: GradientTotals) -> None:
        for position, flat in flat_parts(gradient):
            for row, low, high, start in source.cuts(position, len(flat)):
                self._kernel.measure(flat[low:high], source.signs, start, into, row)

    def _form_of(self, gradients: Sequence[Tensor]) -> list[object]:
        """Return the properties that must not change; read in each step, and so without a loop."""
        kinds = set(map(type, gradients))
        if kinds != {Tensor}:  # other types may override any method
            return [_look_closely(gradient) for gradient in gradients]
        return [
            list(map(self._look, gradients)),
            list(map(Tensor.numel, gradients)),
            list(map(Tensor.is_contiguous, gradients)),
        ]


def _look_closely(gradient: Tensor) -> object:
    if type(gradient) is not Tensor:
        return type(gradient)  # measured alone in any case
    contiguous = gradient.is_contiguous()
    return gradient.dtype, gradient.layout, gradient.device, gradient.numel(), contiguous


def _is_flat(gradient: Tensor) -> bool:
    """Return whether its elements lie in memory one behind the other, in a known type."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.dtype in _FLAT_TYPES
        and gradient.is_contiguous()
    )


class Sketcher:
    """Measures gradients on one device, without a copy in proportion to their size.

    ``groups`` holds the parameters that will be measured. With ``sections``, totals have a row for
    each section of a group, for the audit of the reduction; without, one for each group. The
    sketch's width k must be a prime other than 8,191; the RMS error of a cosine is about ``(1 -
    cos^2)/sqrt(k)``. ``seed``, that of all signs, must be equal on workers that are compared.
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
        divided = any(width % divisor == 0 for divisor in range(2, int(width**0.5) + 1))
        if width < 2 or divided or width == PERIOD:
            raise UsageError(
                f"sketch_width must be a prime other than {PERIOD}, got {width}; "
                f"try {DEFAULT_WIDTH}"
            )
        self.device = device
        self.groups = groups
        self.width = width
        self.seed = seed
        # without sections, parameters are whole, and each group has one row
        self._ranges: dict[str, tuple[Range, ...]]
        self._ranges = {name: (Range(row, 0, 0),) for name, row in groups.index_of.items()}
        self._num_rows = len(groups)
        self._group_of: Tensor | None = None  # each row
        if sections is not None:
            self._ranges = dict(sections.ranges)
            self._num_rows = len(sections)
            if self._num_rows != len(groups):
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
        """Add gradients to the totals of their groups, or of the sections that they lie in.

        A gradient may have any shape and any floating dtype, and lives on this sketcher's device; a
        DTensor counts as its local part. However many they are, it takes one call of a compiled
        function, or two launches for each type of element on an accelerator that has a kernel of
        its own; all is prepared in the first call with the same parameters. Gradients of other
        types and layouts are added one by one.

        Calls on one accelerator must follow one another on its stream: they share scratch space.
        """
        if gradients:
            names, tensors, starts = zip(*gradients, strict=True)
            self.measure_tensors(names, tensors, into, starts=starts)

    def measure_norms(self, gradients: Iterable[tuple[str, Tensor]], into: GradientTotals) -> None:
        """Add squared norms, largest magnitudes and non-finite counts; no sketch.

        Where groups are cut into sections, all of a parameter counts to its first one.
        """
        named = tuple(gradients)
        if named:
            names, tensors = zip(*named, strict=True)
            self.measure_tensors(names, tensors, into, sketching=False)

    def holds_any(self, gradients: Sequence[Tensor], *, whole: bool = False) -> Tensor | None:
        """Return whether any gradient holds something, going by its first elements.

        It is a boolean scalar, None without gradients. ``whole`` goes by all elements: the first
        rows of an embedding, for example, may belong to rare tokens.
        """
        if not gradients:
            return None
        totals = GradientTotals.zeros(1, self.width, self.device)
        if not whole:
            gradients = [
                g if g.is_contiguous() and not g.is_sparse else _head(g) for g in gradients
            ]
        names = (_WHOLE if whole else _HEAD,) * len(gradients)
        self.measure_tensors(names, gradients, totals, sketching=False)
        return totals.largest[0] != 0

    def measure_tensors(
        self,
        names: tuple[str, ...],
        gradients: Sequence[Tensor],
        into: GradientTotals,
        *,
        starts: Sequence[int] = (),  # where each part of a gradient begins; empty: all are whole
        sketching: bool = True,  # False for norms alone
        again: bool = False,
    ) -> None:
        """Add gradients of some parameters, or parts of them; see :meth:`measure_many`.

        ``again``: these are the very tensors of the last call with these names, of which nothing
        but the content can have changed.
        """
        if not names:
            return
        begun = time.perf_counter()
        starts = starts or (0,) * len(names)
        sketching = sketching and self.sketches
        key = (names, starts, sketching)
        reader = self._readers.get(key)
        if reader is None or not (again or reader.fits(gradients)):
            if len(self._readers) >= _MOST_PREPARED:
                self._readers.clear()
            source = partial(self._source, sketching=sketching)
            sources = list(map(source, names, starts))
            reader = self._readers[key] = MultiTensorReader(
                self._kernel, self.device, gradients, sources, sketching=sketching
            )
        reader.measure(gradients, into)
        self._seconds += time.perf_counter() - begun

    def _source(self, name: str, start: int, *, sketching: bool) -> TensorSource:
        """Return where the elements of a gradient belong that begins at ``start``."""
        if name == _HEAD:
            return TensorSource(
                lambda at, count: [] if at else _whole_cuts(0, min(count, _LOOKED_AT)), None
            )
        if not sketching:  # all of a parameter counts to its first section
            row = 0 if name == _WHOLE else self._ranges[name][0].section
            return TensorSource(lambda _, count: _whole_cuts(row, count), None)
        signs = self._signs.get(name)
        if signs is None:
            signs = self._signs[name] = ParameterSigns(name, self.seed, self.device)
        ranges = self._ranges[name]
        first = signs.first % self.width
        return TensorSource(lambda at, count: _cuts(ranges, start + at, count, first), signs)


class NormMeter(Sketcher):
    """A :class:`Sketcher` that leaves all sketches zero, for the tier without them."""

    sketches = False


def _cuts(ranges: Sequence[Range], start: int, count: int, first: int) -> Iterator[Cut]:
    """Cut ``count`` elements from ``start`` on where sections end; the last one has no end.

    ``first`` is the position of the parameter's own first element, for a kernel.
    """
    *before, last = ranges
    for row, begin, end in (*before, Range(last.section, last.start, start + count)):
        low = max(begin - start, 0)
        high = min(end - start, count)
        if low < high:
            yield Cut(row, low, high, first + start + low)


def _whole_cuts(row: int, count: int) -> list[Cut]:
    return [Cut(row, 0, count, 0)] if count else []


def _head(gradient: Tensor) -> Tensor:
    """Return the first elements of a gradient, without a copy."""
    head = gradient.detach()
    if head.is_sparse:
        head = head._values()
    while head.dim() > 1 and head.numel():
        head = head[0]
    return head.reshape(-1)[:_LOOKED_AT]
