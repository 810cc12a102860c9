"""A map from int64 to integers with little more memory than its numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Ints
from rankscope.stats.state import Stateful

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
        for run_values, here, at in self._places(keys):
            found |= here
            values[here] = run_values[at]
        return found, values

    def get(self, key: int) -> int | None:
        """Return the value of one key, None when it is not in the map."""
        place = self._place(key)
        return None if place is None else int(place[0][place[1]])

    def replace(self, keys: Ints, values: NDArray[Any]) -> None:
        """Change the values of keys that are in the map."""
        for run_values, here, at in self._places(keys):
            run_values[at] = values[here]

    def add(self, keys: Ints, values: NDArray[Any]) -> None:
        """Add sorted keys that are not in the map yet."""
        if not len(keys):
            return
        all_keys = [keys]
        all_values = [values.astype(self._value_type)]
        size = len(keys)
        while self._runs and len(self._runs[-1][0]) <= 2 * size:
            run_keys, run_values = self._runs.pop()
            all_keys.append(run_keys)
            all_values.append(run_values)
            size += len(run_keys)
        if len(all_keys) == 1:
            self._runs.append((keys.copy(), all_values[0]))
            return
        merged = np.concatenate(all_keys)
        order = merged.argsort(kind="stable")  # sorted runs: merged, not sorted
        self._runs.append((merged[order], np.concatenate(all_values)[order]))

    def keep(self, admitted: Admits) -> None:
        """Forget all keys but those for which ``admitted`` is true."""
        kept = [(keys, values, admitted(keys)) for keys, values in self._runs]
        self._runs = [(keys[here], values[here]) for keys, values, here in kept if here.any()]

    def put(self, keys: Ints, values: NDArray[Any]) -> tuple[Bools, NDArray[Any]]:
        """Set the values of sorted keys, which may be in the map or not.

        Returns:
            As :meth:`find`: which keys were in the map before, and their values then.
        """
        found = np.zeros(len(keys), bool)
        before = np.zeros(len(keys), self._value_type)
        for run_values, here, at in self._places(keys):
            found |= here
            before[here] = run_values[at]
            run_values[at] = values[here]
        if not found.all():
            self.add(keys[~found], values[~found])
        return found, before

    def put_one(self, key: int, value: int) -> None:
        """Set the value of one key, which may be in the map or not."""
        place = self._place(key)
        if place is None:
            self.add(np.array([key], np.int64), np.array([value]))
        else:
            run_values, at = place
            run_values[at] = value

    def _places(self, keys: Ints) -> Iterator[tuple[NDArray[Any], Bools, Ints]]:
        """Yield, for each run that has some of the keys: its values, which keys, and where."""
        for run_keys, run_values in self._runs:
            at = run_keys.searchsorted(keys)
            here = run_keys.take(at, mode="clip") == keys
            if here.any():
                yield run_values, here, at[here]

    def _place(self, key: int) -> tuple[NDArray[Any], int] | None:
        """Return the values of the run that has a key, and where; None when no run has it."""
        for run_keys, run_values in self._runs:
            at = int(run_keys.searchsorted(key))
            if at < len(run_keys) and run_keys[at] == key:
                return run_values, at
        return None


def count_common(keys: Ints, others: Ints) -> int:
    """Return how many of some keys are among others."""
    if not len(others):
        return 0
    ordered = np.sort(others)
    return int(np.count_nonzero(ordered.take(ordered.searchsorted(keys), mode="clip") == keys))


def in_order(keys: Ints) -> Ints:
    """Return the different ones of some keys, sorted."""
    ordered = np.sort(keys)
    new = ordered[1:] != ordered[:-1]
    return ordered if new.all() else ordered[np.concatenate(([True], new))]
