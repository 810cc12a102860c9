"""The random signs of the sketch: one per row of each parameter, and one of prime period."""

import hashlib

import torch
from torch import Tensor

PERIOD = 8191
_FIRST_DRAW = 64


class ParameterSigns:
    """Where one parameter lies in the sketch, and the signs of its rows, drawn as needed.

    Args:
        name: The parameter's name.
        seed: Seed of all signs.
        device: Where the row signs are needed.

    Attributes:
        first: Position of the parameter's first element, to be taken modulo the sketch's width.
            Small parameters would otherwise all lie in the same few buckets.
        shift: Where the signs of prime period begin.
    """

    def __init__(self, name: str, seed: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
        self.first = int.from_bytes(digest[8:], "little")
        self._generator = _generator(int.from_bytes(digest[:8], "little") >> 1)
        self._device = device
        self.shift = int(torch.randint(PERIOD, (), generator=self._generator, device="cpu"))
        self._rows = torch.empty(0, device=device, dtype=torch.float32)

    def rows(self, count: int) -> Tensor:
        """Return the signs of at least the first ``count`` rows; a longer draw begins alike."""
        missing = count - len(self._rows)
        if missing > 0:
            more = _random_signs(max(missing, _FIRST_DRAW), self._generator)
            self._rows = torch.cat([self._rows, more.to(self._device)])
        return self._rows


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
