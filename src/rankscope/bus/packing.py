"""A header in JSON and arrays behind it, as one run of bytes: nothing is ever pickled."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = 8  # bytes of the header's length


class PackedError(ValueError):
    """Bytes without the expected content."""


def pack_headed(header: Any, *parts: bytes) -> bytes:
    """Return bytes that begin with a header in JSON."""
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def unpack_headed(packed: bytes | bytearray | memoryview) -> tuple[Any, memoryview]:
    """Return the header and the bytes after it; PackedError if there is no header."""
    content = memoryview(packed)
    at = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    try:
        return json.loads(bytes(content[_LENGTH:at])), content[at:]
    except ValueError as error:
        raise PackedError(f"these bytes have no header ({error})") from error


def pack_arrays(header: Any, arrays: Sequence[NDArray[Any]]) -> bytes:
    """Return a header and arrays of any shapes as bytes.

    Example:
        >>> header, (array,) = unpack_arrays(pack_arrays({"step": 3}, [np.eye(2)]))
        >>> header, array.tolist()
        ({'step': 3}, [[1.0, 0.0], [0.0, 1.0]])
    """
    shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
    return pack_headed([header, shapes], *(array.tobytes() for array in arrays))


def unpack_arrays(packed: bytes | bytearray | memoryview) -> tuple[Any, list[NDArray[Any]]]:
    """Return header and arrays, as views into ``packed``; PackedError if there are none."""
    content = unpack_headed(packed)
    arrays = list[NDArray[Any]]()
    at = 0
    try:
        (header, shapes), rest = content
        for name, shape in shapes:
            dtype = np.dtype(name)
            if dtype.hasobject:
                raise PackedError("expected numbers, got an array of objects")
            array = np.frombuffer(rest, dtype, prod(shape), at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
    except (ValueError, TypeError) as error:
        raise PackedError(f"these bytes hold no arrays ({error})") from error
    return header, arrays


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """The inputs of one forward pass."""

    structure: Any  # arguments by position and by name, as plain JSON in which tensors are numbered
    # the tensors. Types that numpy lacks are held as integers of the same bits
    arrays: tuple[NDArray[Any], ...]
    # int64 digest of the content of each sample; empty where none was recognised
    samples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(array.nbytes for array in self.arrays)


def pack_batch(batch: PlainBatch) -> bytes:
    """Return a batch as bytes."""
    return pack_arrays(batch.structure, (batch.samples, *batch.arrays))


def unpack_batch(packed: bytes | memoryview) -> PlainBatch:
    """Return the batch in these bytes, as views into them; PackedError if there is none."""
    structure, arrays = unpack_arrays(packed)
    if not arrays:
        raise PackedError("these bytes hold no batch")
    return PlainBatch(structure, tuple(arrays[1:]), arrays[0].astype(np.int64))
