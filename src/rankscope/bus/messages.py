"""One step of several workers, as columns: what combiners read.

Legend of shapes: W workers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Floats, Ints, Ragged


@dataclass(frozen=True)
class Messages:
    """One step of several workers.

    Attributes:
        step: Step number.
        times_W: Unix time in seconds at which each worker's step ended.
        items_W: Digest of kinds and names of each worker's compared state.
        arrays: All workers' arrays, by the names that evidence declares.
    """

    step: int
    times_W: Floats
    items_W: Ints
    arrays: Mapping[str, Ragged]

    def __len__(self) -> int:
        return len(self.items_W)

    def __getitem__(self, name: str) -> Ragged:
        return self.arrays[name]

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which workers' messages hold a gradient ``[W]``."""
        return np.asarray(self["numbers"].lengths_R > 0)

    @cached_property
    def named(self) -> tuple[dict[str, Any], ...]:
        """What each worker has sent by name ``[W]``, empty in most steps; equal ones are shared."""
        packed = self["names"]
        if not len(packed.flat):
            return ({},) * len(self)
        known: dict[bytes, dict[str, Any]] = {b"": {}}
        found = []
        for row in packed.rows:
            text = row.tobytes()
            if text not in known:
                known[text] = json.loads(text)
            found.append(known[text])
        return tuple(found)
