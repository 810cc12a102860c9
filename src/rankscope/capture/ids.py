"""Numbers for ids of any type: equal ids have equal numbers on all workers and in every run."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rankscope.errors import UsageError

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def ids_of(samples: object) -> NDArray[np.int64]:
    """Return one number per id.

    Integers stand for themselves; everything else is digested: text, bytes, other numbers, UUIDs,
    dates, paths, and tuples or lists of these.

    Args:
        samples: Ids in any iterable.

    Raises:
        UsageError: It is no iterable of ids, or an id has no content that all workers see alike.
    """
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "iu":
        return samples.astype(np.int64).reshape(-1)
    if isinstance(samples, np.ndarray):
        samples = samples.reshape(-1).tolist()
    if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, Mapping)):
        return np.array([_number(sample) for sample in samples], np.int64)
    raise UsageError(
        f"batch() expected ids (numbers, text, UUIDs, tuples) or the tensors of a batch, "
        f"got {type(samples).__name__}; pass one id per sample"
    )


def digests_of_texts(texts: Sequence[str | bytes]) -> NDArray[np.int64]:
    """Return one digest per text."""
    return np.array([_digest(_content(text)) for text in texts], np.int64)


def _number(sample: Any) -> int:
    if isinstance(sample, (np.generic, np.ndarray)) and sample.ndim == 0:
        sample = sample.item()
    if isinstance(sample, Tensor) and sample.numel() == 1:
        sample = sample.item()
    if isinstance(sample, float) and sample.is_integer():
        sample = int(sample)
    if isinstance(sample, int) and _LOWEST < sample <= _HIGHEST:
        return int(sample)
    return _digest(_content(sample))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _content(sample: Any) -> bytes:
    """Return bytes that stand for an id."""
    if isinstance(sample, str):
        return sample.encode("utf-8", "surrogatepass")
    if isinstance(sample, bytes):
        return b"\0bytes " + sample
    if isinstance(sample, np.ndarray):
        sample = sample.tolist()
    if isinstance(sample, (tuple, list)):
        numbers = np.array([_number(part) for part in sample], np.int64)
        return b"\0tuple " + numbers.tobytes()
    if isinstance(sample, float) and math.isnan(sample):
        raise _refused(sample, "NaN is no id")
    if sample is None or isinstance(sample, (Mapping, Set, Tensor)) or not _says_what_it_is(sample):
        raise _refused(sample, f"got {type(sample).__name__}")
    return f"\0{type(sample).__qualname__} {sample!r}".encode("utf-8", "surrogatepass")


def _says_what_it_is(sample: object) -> bool:
    """Return whether an object's ``repr`` tells its content, not its address in memory."""
    return type(sample).__repr__ is not object.__repr__ and not callable(sample)


def _refused(sample: object, what: str) -> UsageError:
    return UsageError(
        f"batch() expected numbers, text, UUIDs or tuples of these as ids, {what}; "
        "pass one id per sample"
    )
