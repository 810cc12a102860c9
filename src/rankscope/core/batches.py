"""A batch as plain data: what entered a model, ready for another worker or for a file.

The structure is JSON; tensors are arrays beside it. Nothing is ever pickled.
"""

import json
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = 8  # bytes that say how long the header is


class BatchError(ValueError):
    """Bytes that hold no batch."""


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """What entered a model in one forward pass.

    Attributes:
        structure: Arguments by position and by name, as plain JSON in which tensors are numbered.
        arrays: The tensors. Types that numpy lacks are held as integers of the same bits.
        samples: int64 digest of the content of each sample; empty where none was recognised.
    """

    structure: Any
    arrays: tuple[NDArray[Any], ...]
    samples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(array.nbytes for array in self.arrays)


def pack_batch(batch: PlainBatch) -> bytes:
    """Return a batch as bytes: a header in JSON, then array after array."""
    arrays = (batch.samples, *batch.arrays)
    header = {
        "structure": batch.structure,
        "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
    }
    return pack_headed(header, *(array.tobytes() for array in arrays))


def unpack_batch(packed: bytes | memoryview) -> PlainBatch:
    """Return the batch that bytes hold; its arrays look into them.

    Raises:
        BatchError: They hold none.
    """
    header, content = unpack_headed(packed)
    try:
        arrays, at = [], 0
        for name, shape in header["arrays"]:
            dtype = np.dtype(name)
            if dtype.hasobject:
                raise BatchError("an array of objects")
            array = np.frombuffer(content, dtype, prod(shape), at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
        return PlainBatch(header["structure"], tuple(arrays[1:]), arrays[0].astype(np.int64))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BatchError(f"these bytes hold no batch ({error})") from error


def pack_headed(header: Any, *parts: bytes) -> bytes:
    """Return bytes that begin with a header in JSON."""
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def unpack_headed(packed: bytes | memoryview) -> tuple[Any, memoryview]:
    """Return the header of such bytes, and what follows it.

    Raises:
        BatchError: They have none.
    """
    content = memoryview(packed)
    at = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    try:
        return json.loads(bytes(content[_LENGTH:at])), content[at:]
    except ValueError as error:
        raise BatchError(f"these bytes hold no batch ({error})") from error
