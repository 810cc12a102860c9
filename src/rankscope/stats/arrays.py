"""Types of arrays for signatures, and functions of arrays for all modules."""

import hashlib

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]

_HALF = np.uint64(32)
_FACTORS = tuple(map(np.uint64, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93)))


def median(values: Floats) -> Floats:
    """Return the median over the last axis of numbers none of which is NaN.

    The same, bit for bit, as numpy's, and faster.

    Example:
        >>> median(np.array([[1.0, 9.0, 2.0, 4.0], [5.0, 5.0, 5.0, 0.0]])).tolist()
        [3.0, 5.0]
    """
    last = values.shape[-1] - 1
    return _middle(np.partition(values, [last // 2, (last + 1) // 2], axis=-1))


def median_of_known(values: Floats) -> Floats:
    """Return the median over the last axis of all numbers but NaN; NaN where there is none.

    Example:
        >>> median_of_known(np.array([[1.0, np.nan, 2.0, 4.0], [np.nan] * 4])).tolist()
        [2.0, nan]
    """
    width = values.shape[-1]
    known = width - np.count_nonzero(np.isnan(values), axis=-1, keepdims=True)
    if known.size and known.min() == width:
        return median(values)
    at_lower, at_upper = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, width - 1)
    places = np.unique([at_lower, at_upper])
    ordered = np.partition(values, places, axis=-1)  # NaN comes last
    lower = np.take_along_axis(ordered, at_lower, axis=-1)
    upper = np.take_along_axis(ordered, at_upper, axis=-1)
    middle: Floats = np.where(lower == upper, lower, (lower + upper) / 2)[..., 0]
    return middle


def _middle(ordered: Floats) -> Floats:
    count = ordered.shape[-1]
    upper: Floats = ordered[..., count // 2]
    return upper if count % 2 else (ordered[..., count // 2 - 1] + upper) / 2


def mix(values: Ints) -> NDArray[np.uint64]:
    """Return one 64-bit hash per number: xor, shift and multiply, three times over."""
    bits: NDArray[np.uint64] = np.array(values, np.int64).view(np.uint64)
    for factor in _FACTORS:
        bits ^= bits >> _HALF
        bits *= factor
    bits ^= bits >> _HALF
    return bits


def digest_of(content: bytes) -> int:
    """Return a 63-bit digest of bytes, in order."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
