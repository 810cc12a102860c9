"""Arrays of different lengths, one after the other: those of many workers without one object each.

Legend of shapes: R rows, of any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.stats.arrays import Ints


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths.

    Attributes:
        flat: All rows, one after the other.
        lengths_R: Their lengths.

    Example:
        >>> rows = Ragged(np.array([1.0, 2.0, 5.0]), np.array([2, 0, 1]))
        >>> rows.reduced(np.add, 0.0).tolist(), [row.tolist() for row in rows.rows]
        ([3.0, 0.0, 5.0], [[1.0, 2.0], [], [5.0]])
    """

    flat: NDArray[Any]
    lengths_R: Ints

    @classmethod
    def of(cls, rows: Sequence[NDArray[Any]]) -> "Ragged":
        """Return the rows of one or more arrays ``[·]``."""
        return cls(np.concatenate(rows), np.array([len(row) for row in rows], np.int64))

    @classmethod
    def joined(cls, parts: Sequence["Ragged"]) -> "Ragged":
        """Return the rows of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        lengths = [part.lengths_R for part in parts]
        return cls(np.concatenate([part.flat for part in parts]), np.concatenate(lengths))

    def __len__(self) -> int:
        return len(self.lengths_R)

    @cached_property
    def firsts(self) -> Ints:
        """Where each row begins."""
        return np.cumsum(self.lengths_R) - self.lengths_R

    @property
    def rows(self) -> tuple[NDArray[Any], ...]:
        """One view per row."""
        ends = np.cumsum(self.lengths_R).tolist()
        spans = map(slice, [0, *ends[:-1]], ends)
        return tuple(map(self.flat.__getitem__, spans))

    @property
    def is_even(self) -> bool:
        """Whether all rows have one length."""
        return bool((self.lengths_R == self.lengths_R[0]).all())

    @property
    def matrix(self) -> NDArray[Any]:
        """The rows of one length, as a matrix."""
        return self.flat.reshape(len(self), self.lengths_R[0])

    def take(self, chosen: Ints) -> "Ragged":
        """Return some rows, in the given order."""
        if np.array_equal(chosen, np.arange(len(self))):
            return self
        lengths = self.lengths_R[chosen]
        shifts = self.firsts[chosen] - (np.cumsum(lengths) - lengths)
        return Ragged(self.flat[np.repeat(shifts, lengths) + np.arange(lengths.sum())], lengths)

    def spread(self, values_R: NDArray[Any]) -> NDArray[Any]:
        """Return the value of its row for each element."""
        return np.repeat(values_R, self.lengths_R)

    def where(self, chosen: NDArray[np.bool_]) -> "Ragged":
        """Return the rows without the elements that are not chosen."""
        counts = Ragged(chosen, self.lengths_R).reduced(np.add, 0, np.int64)
        return Ragged(self.flat[chosen], counts)

    def reduced(self, ufunc: np.ufunc, empty: Any, dtype: Any = None) -> NDArray[Any]:
        """Return each row reduced to one number, with the bits that the row alone would have.

        Args:
            ufunc: Such as ``np.add``.
            empty: The result for rows without elements.
            dtype: Type of the result; None: that of the elements.
        """
        found = np.full(len(self), empty, self.flat.dtype if dtype is None else dtype)
        for length in np.flatnonzero(np.bincount(self.lengths_R)[1:]) + 1:
            same_R = self.lengths_R == length
            if same_R.all():
                return np.asarray(ufunc.reduce(self.matrix, axis=1, dtype=dtype))
            elements_rL = self.flat[self.firsts[same_R][:, None] + np.arange(length)]
            found[same_R] = ufunc.reduce(elements_rL, axis=1, dtype=dtype)
        return found
