"""One pass over a gradient that yields its squared norm and a short linear sketch.

The sketch S is a count sketch of prime width k. Element e of a parameter, with c = e mod k and
r = e div k, is added to S[c] with the sign

    row_sign[r] * period_sign[(e + shift) mod p],

where the row signs and the shift are drawn for each parameter from the seed and its name, and the
period signs have the prime length p = 8,191. One sign per row alone would let structured
gradients (constant, positive activations, sparse rows) through with errors ten times as large;
the product of the two coprime periods does not (docs/metrics.md has the table).

S is linear, so the sketch of a sum is the sum of sketches, and ``S(g).S(h)`` estimates ``g.h``
with variance of order ``|g|^2 |h|^2 / k``. Signs depend on nothing but seed, name and index: they
agree between workers, steps, bucket rebuilds and restarts.

Source of the method: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams"
(2002).
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.capture.totals import GradientTotals
from rankscope.core.groups import Groups
from rankscope.errors import UsageError

DEFAULT_WIDTH = 4093
PERIOD = 8191
_CHUNK_ELEMENTS = {"cpu": 1 << 16}  # 256 KB in fp32: stays in a core's cache
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 24


class _ParameterSigns:
    """The signs of one parameter's rows, drawn as far as they are needed."""

    def __init__(self, name: str, seed: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        self._device = device
        self.shift = int(torch.randint(PERIOD, (), generator=self._generator))
        self._rows = torch.empty(0, device=device)

    def rows(self, count: int) -> Tensor:
        """Return the signs of at least the first ``count`` rows; a longer draw begins alike."""
        if len(self._rows) < count:
            more = _random_signs(max(count - len(self._rows), 64), self._generator)
            self._rows = torch.cat([self._rows, more.to(self._device)])
        return self._rows


class Sketcher:
    """Measures gradients on one device, without a copy in proportion to their size.

    Args:
        device: Where the gradients live.
        groups: The parameters that will be measured, and their groups.
        width: Sketch width k, a prime other than 8,191; the RMS error of a cosine is about
            ``(1 - cos^2)/sqrt(k)``.
        seed: Seed of all signs; equal on workers that are compared.

    Raises:
        UsageError: ``width`` is not such a prime.
    """

    sketches = True
    """Whether :meth:`measure` fills sketches, or norms alone."""

    def __init__(
        self, device: torch.device, groups: Groups, width: int = DEFAULT_WIDTH, seed: int = 0
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
        elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_ACCELERATOR)
        self._chunk_rows = max(1, elements // width)
        self._scratch = torch.empty(0, device=device)
        self._period = torch.empty(0, device=device)
        self._signs: dict[str, _ParameterSigns] = {}

    def new_totals(self) -> GradientTotals:
        """Return totals of nothing, to be filled by :meth:`measure`."""
        return GradientTotals.zeros(len(self.groups), self.width, self.device)

    @torch.no_grad()
    def measure(self, name: str, gradient: Tensor, into: GradientTotals, *, start: int = 0) -> None:
        """Add one parameter's gradient, or a contiguous part of it, to its group's totals.

        Args:
            name: The parameter's name, which selects the group and the signs.
            gradient: Any shape, any floating dtype, on this sketcher's device; a DTensor counts
                as its local part.
            into: The totals to add to.
            start: Position of the gradient's first element in the whole flat parameter.
        """
        flat = _flatten(gradient)
        group = self.groups.index_of[name]
        signs = self._signs_of(name)
        self._reserve()
        position = start
        while len(flat):
            size = (
                self._chunk_rows * self.width
                if position % self.width == 0
                else (self.width - position % self.width)
            )
            self._measure_chunk(flat[:size], signs, position, into, group)
            flat, position = flat[size:], position + size

    @torch.no_grad()
    def measure_norm(self, name: str, gradient: Tensor, into: GradientTotals) -> None:
        """Add a gradient's squared norm, largest magnitude and non-finite count; no sketch."""
        flat = _flatten(gradient)
        group = self.groups.index_of[name]
        for chunk in flat.split(self._chunk_rows * self.width):
            self._count(chunk.float(), into, group)

    def _measure_chunk(
        self, chunk: Tensor, signs: _ParameterSigns, start: int, into: GradientTotals, group: int
    ) -> None:
        size = chunk.numel()
        signed = self._scratch[:size]
        offset = (start + signs.shift) % PERIOD
        torch.mul(chunk.float(), self._period[offset : offset + size], out=signed)
        first_row, column = divmod(start, self.width)
        row_signs = signs.rows(first_row + size // self.width + 1)[first_row:]
        sketch = into.sketches[group]
        full = size // self.width
        if full:
            matrix = signed[: full * self.width].view(full, self.width)
            sketch.addmv_(matrix.t(), row_signs[:full])
        rest = size - full * self.width
        if rest:
            sketch[column : column + rest].add_(signed[full * self.width :] * row_signs[full])
        self._count(chunk.float(), into, group)

    def _count(self, chunk: Tensor, into: GradientTotals, group: int) -> None:
        # A sum adds pairwise and errs by 1e-7; a dot product of this length errs by 4e-6.
        into.squared_norms[group].add_((chunk * chunk).sum())
        if chunk.numel():
            torch.maximum(into.largest[group], chunk.abs().amax(), out=into.largest[group])
        into.nonfinite[group].add_((~chunk.isfinite()).sum())

    def _signs_of(self, name: str) -> _ParameterSigns:
        signs = self._signs.get(name)
        if signs is None:
            signs = self._signs[name] = _ParameterSigns(name, self.seed, self.device)
        return signs

    def _reserve(self) -> None:
        """Make scratch space and period signs for a chunk."""
        if self._scratch.numel():
            return
        elements = self._chunk_rows * self.width
        self._scratch = torch.empty(elements, device=self.device)
        generator = torch.Generator().manual_seed(self.seed)
        period = _random_signs(PERIOD, generator)
        repeats = -(-elements // PERIOD) + 1
        self._period = period.repeat(repeats).to(self.device)


def _flatten(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.reshape(-1)


def _random_signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (count,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
