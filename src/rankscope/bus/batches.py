"""A batch as plain data: the inputs of a model, ready for another worker or for a file.

The structure is JSON; tensors are arrays beside it. Nothing is ever pickled.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.packing import PackedError, pack_arrays, unpack_arrays


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """The inputs of one forward pass.

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
    """Return a batch as bytes."""
    return pack_arrays(batch.structure, (batch.samples, *batch.arrays))


def unpack_batch(packed: bytes | memoryview) -> PlainBatch:
    """Return the batch in these bytes, as views into them; PackedError if there is none."""
    structure, arrays = unpack_arrays(packed)
    if not arrays:
        raise PackedError("these bytes hold no batch")
    return PlainBatch(structure, tuple(arrays[1:]), arrays[0].astype(np.int64))
