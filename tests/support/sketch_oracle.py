"""The sketch written out from its definition, element by element, in float64."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

PERIOD = 8191


@dataclass
class Truth:
    sketch: np.ndarray
    squared_norm: float
    largest: float
    nonfinite: int


def signs_of(name: str, seed: int, num_rows: int) -> tuple[int, np.ndarray, np.ndarray]:
    period = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(int.from_bytes(_digest(name, seed)[:8], "little") // 2)
    shift = torch.randint(PERIOD, (), generator=own).item()
    rows = torch.randint(2, (num_rows,), generator=own, dtype=torch.float32)
    period_bits = torch.randint(2, (PERIOD,), generator=period, dtype=torch.float32)
    return shift, 2 * rows.double().numpy() - 1, 2 * period_bits.double().numpy() - 1


def first_position(name: str, seed: int, width: int) -> int:
    return int.from_bytes(_digest(name, seed)[8:], "little") % width


def _digest(name: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()


def truth(name: str, seed: int, gradient: torch.Tensor, width: int, start: int = 0) -> Truth:
    values = gradient.detach().double().flatten().numpy()
    position = start + np.arange(len(values))
    shift, row_sign, period_sign = signs_of(name, seed, (start + len(values)) // width + 1)
    sign = row_sign[position // width] * period_sign[(position + shift) % PERIOD]
    sketch = np.zeros(width)
    with np.errstate(invalid="ignore"):
        np.add.at(sketch, position % width, sign * values)
        return Truth(
            sketch,
            float(values @ values),
            float(np.abs(values).max(initial=0.0)),
            int((~np.isfinite(values)).sum()),
        )
