"""The interface of kernels, and their inputs: random signs of the sketch, pieces of gradients."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rankscope.gradients.totals import GradientTotals

PERIOD = 8191
_FIRST_DRAW = 64


class ParameterSigns:
    """Where one parameter lies in the sketch, and the signs of its rows, drawn as needed.

    The position of its ``first`` element, modulo the sketch's width, depends on its name: small
    parameters would otherwise all lie in the same few buckets. The signs of prime period begin at
    ``shift``.
    """

    def __init__(self, name: str, seed: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
        self.first = int.from_bytes(digest[8:], "little")
        self._seed = int.from_bytes(digest[:8], "little") >> 1
        self._device = device
        self.shift, self._rows = self._draw(_FIRST_DRAW)

    def rows(self, count: int) -> Tensor:
        """Return the signs of at least the first ``count`` rows; a longer draw begins alike."""
        if count > len(self._rows):
            _, self._rows = self._draw(max(count, 2 * len(self._rows)))
        return self._rows

    def _draw(self, count: int) -> tuple[int, Tensor]:
        """Return the shift and the signs of the first rows; a kept generator would be large."""
        generator = _generator(self._seed)
        shift = int(torch.randint(PERIOD, (), generator=generator, device="cpu"))
        return shift, _random_signs(count, generator).to(self._device)


def period_signs(seed: int) -> Tensor:
    """Return the signs of prime period ``[PERIOD]``, float32, on the CPU."""
    return _random_signs(PERIOD, _generator(seed))


def extend(signs: Tensor, length: int) -> Tensor:
    """Return periodic signs repeated up to ``length``."""
    return signs.repeat(-(-length // len(signs)))[:length].contiguous()


def _random_signs(count: int, generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, (count,), generator=generator, dtype=torch.float32, device="cpu")
    return bits.mul_(2).sub_(1)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a gradient, all of which count to one row of the totals."""

    source: int  # which of the gradients
    offset: int  # position of the piece's first element in it
    count: int  # of elements, at least one
    dtype: torch.dtype  # float32, bfloat16 or float16; any floating one of a single piece
    row: int  # of the totals
    signs: ParameterSigns | None  # the parameter's; None where norms alone are measured
    start: int  # position of the first element in the whole flat parameter, as a kernel counts


class Prepared(Protocol):
    """Measures gradients of which nothing but their memory changes from call to call."""

    def measure(
        self, gradients: Sequence[Tensor], pointers: Sequence[int], into: GradientTotals
    ) -> None:
        """Add gradients, contiguous and like the pieces, to totals, given their addresses."""


class Kernel(ABC):
    """Measures flat parts of gradients on one device; its calls must follow one another there."""

    name: str
    """One of ``torch``, ``native`` and ``triton``."""

    @abstractmethod
    def prepare(self, pieces: Sequence[Piece], *, sketching: bool) -> Prepared:
        """Prepare to measure some pieces at once, in a number of calls that is always small."""

    def measure(
        self,
        flat: Tensor,
        signs: ParameterSigns | None,
        start: int,
        into: GradientTotals,
        group: int,
    ) -> None:
        """Add a flat part of a gradient to one row of totals.

        The part is a contiguous ``[n > 0]`` of any floating dtype. ``start`` is the position of its
        first element in the whole flat parameter. Without signs, no sketch is made.
        """
        piece = Piece(0, 0, len(flat), flat.dtype, group, signs, start)
        prepared = self.prepare([piece], sketching=signs is not None)
        prepared.measure([flat], [flat.data_ptr()], into)
