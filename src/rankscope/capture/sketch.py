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
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.errors import UsageError

DEFAULT_WIDTH = 4093
PERIOD = 8191
_CHUNK_ELEMENTS = {"cpu": 1 << 16}  # 256 KB in fp32: stays in a core's cache
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 24


@dataclass(slots=True)
class GradientMeasure:
    """Running totals of one or more gradients.

    Attributes:
        sketch: float32 ``[k]``.
        squared_norm: float64 scalar tensor: the sum of squares of all elements.
    """

    sketch: Tensor
    squared_norm: Tensor

    def reset(self) -> None:
        """Set both totals to zero, in place."""
        self.sketch.zero_()
        self.squared_norm.zero_()

    def add(self, other: "GradientMeasure") -> None:
        """Add the totals of disjoint parameters."""
        self.sketch.add_(other.sketch)
        self.squared_norm.add_(other.squared_norm)


@dataclass(frozen=True, slots=True)
class _ParameterSigns:
    rows: Tensor
    shift: int


class Sketcher:
    """Measures gradients on one device, without a copy in proportion to their size.

    Args:
        device: Where the gradients live.
        width: Sketch width k, a prime other than 8,191; the RMS error of a cosine is about
            ``(1 - cos^2)/sqrt(k)``.
        seed: Seed of all signs; equal on workers that are compared.

    Raises:
        UsageError: ``width`` is not such a prime.
    """

    def __init__(self, device: torch.device, width: int = DEFAULT_WIDTH, seed: int = 0) -> None:
        if not _is_prime(width) or width == PERIOD:
            raise UsageError(
                f"sketch_width must be a prime other than {PERIOD}, got {width}; "
                f"try {DEFAULT_WIDTH}"
            )
        self.device = device
        self.width = width
        self.seed = seed
        elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_ACCELERATOR)
        self._chunk_rows = max(1, elements // width)
        self._scratch = torch.empty(0, device=device)
        self._period = torch.empty(0, device=device)
        self._signs: dict[str, _ParameterSigns] = {}

    def new_measure(self) -> GradientMeasure:
        """Return totals of nothing, to be filled by :meth:`measure`."""
        return GradientMeasure(
            torch.zeros(self.width, device=self.device),
            torch.zeros((), device=self.device, dtype=torch.float64),
        )

    @torch.no_grad()
    def measure(self, name: str, gradient: Tensor, into: GradientMeasure) -> None:
        """Add one parameter's gradient to the totals.

        Args:
            name: The parameter's name, which selects the signs.
            gradient: Any shape, any floating dtype, on this sketcher's device.
            into: The totals to add to.
        """
        flat = _flatten(gradient)
        signs = self._signs_of(name, flat.numel())
        rows = -(-flat.numel() // self.width)
        self._reserve(min(rows, self._chunk_rows))
        for first_row in range(0, rows, self._chunk_rows):
            self._measure_chunk(flat, signs, first_row, into)

    def _measure_chunk(
        self, flat: Tensor, signs: _ParameterSigns, first_row: int, into: GradientMeasure
    ) -> None:
        start = first_row * self.width
        chunk = flat[start : start + self._chunk_rows * self.width]
        size = chunk.numel()
        signed = self._scratch[:size]
        offset = (start + signs.shift) % PERIOD
        period = self._period[offset : offset + size]
        if chunk.dtype == torch.float32:
            torch.mul(chunk, period, out=signed)
        else:
            signed.copy_(chunk)
            signed.mul_(period)
        full = size // self.width
        row_signs = signs.rows[first_row : first_row + full + 1]
        if full:
            matrix = signed[: full * self.width].view(full, self.width)
            into.sketch.addmv_(matrix.t(), row_signs[:full])
        rest = size - full * self.width
        if rest:
            into.sketch[:rest].add_(signed[full * self.width :] * row_signs[full])
        # A sum adds pairwise and errs by 1e-7; a dot product of this length errs by 4e-6.
        into.squared_norm.add_(torch.mul(signed, signed, out=signed).sum())

    def _signs_of(self, name: str, numel: int) -> _ParameterSigns:
        signs = self._signs.get(name)
        if signs is None:
            digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            shift = int(torch.randint(PERIOD, (), generator=generator))
            rows = _random_signs(-(-numel // self.width), generator)
            signs = self._signs[name] = _ParameterSigns(rows.to(self.device), shift)
        return signs

    def _reserve(self, rows: int) -> None:
        """Make scratch space and period signs large enough for a chunk of ``rows`` rows."""
        if self._scratch.numel() >= rows * self.width:
            return
        self._scratch = torch.empty(rows * self.width, device=self.device)
        generator = torch.Generator().manual_seed(self.seed)
        period = _random_signs(PERIOD, generator)
        repeats = -(-(rows * self.width) // PERIOD) + 1
        self._period = period.repeat(repeats).to(self.device)


def _flatten(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.reshape(-1)


def _random_signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (count,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
