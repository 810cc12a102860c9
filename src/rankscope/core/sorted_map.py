"""A map from int64 to integers that costs little more memory than its numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Ints
from rankscope.core.state import Stateful

Bools = NDArray[np.bool_]
Admits = Callable[[Ints], Bools]


class SortedMap(Stateful):
    """A growing map from int64 to integers, kept in a few sorted arrays of doubling sizes.

    Args:
        value_type: Type of the values.
    """

    SETTINGS = ("_value_type",)

    def __init__(self, value_type: type[np.signedinteger[Any]]) -> None:
        self._value_type = value_type
        self._runs: list[tuple[Ints, NDArray[Any]]] = []

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def find(self, keys: Ints) -> tuple[Bools, NDArray[Any]]:
        """Return which keys are in the map, and their values; fastest when they are sorted."""
        found = np.zeros(len(keys), bool)
        values = np.zeros(len(keys), self._value_type)
        for run_keys, run_values in self._runs:
            at = np.minimum(np.searchsorted(run_keys, keys), len(run_keys) - 1)
            here = run_keys[at] == keys
            found |= here
            values[here] = run_values[at[here]]
        return found, values

    def replace(self, keys: Ints, values: NDArray[Any]) -> None:
        """Change the values of keys that are in the map."""
        for run_keys, run_values in self._runs:
            at = np.minimum(np.searchsorted(run_keys, keys), len(run_keys) - 1)
            here = run_keys[at] == keys
            run_values[at[here]] = values[here]

    def add(self, keys: Ints, values: NDArray[Any]) -> None:
        """Add sorted keys that are not in the map yet."""
        if not len(keys):
            return
        self._runs.append((keys.copy(), values.astype(self._value_type)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            parts = zip(self._runs.pop(), self._runs.pop(), strict=True)
            merged_keys, merged_values = (np.concatenate(part) for part in parts)
            order = np.argsort(merged_keys, kind="stable")  # two sorted halves: merged, not sorted
            self._runs.append((merged_keys[order], merged_values[order]))

    def keep(self, admitted: Admits) -> None:
        """Forget all keys but those for which ``admitted`` is true."""
        kept = [(keys, values, admitted(keys)) for keys, values in self._runs]
        self._runs = [(keys[here], values[here]) for keys, values, here in kept if here.any()]

    def put(self, keys: Ints, values: NDArray[Any]) -> None:
        """Set the values of sorted keys, which may be in the map or not."""
        known = self.find(keys)[0]
        self.replace(keys[known], values[known])
        self.add(keys[~known], values[~known])
