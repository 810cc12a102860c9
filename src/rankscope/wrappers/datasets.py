"""The rows of a data set: digests by which ranks see whether theirs are the same, in one order."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from rankscope.stats.arrays import digest_of

_ROWS = 64  # that are looked at
_STORED_ROWS = 16  # of a table of ``datasets``, which lie in files
_DEPTH = 3  # data sets inside of others
_ELEMENTS = 4096  # of a row that are read
_FIELDS = 16  # arrays in one list of a data set, as in TensorDataset


def rows_digest(data: Any) -> int | None:
    """Return a digest of the rows that a data set has, and of their order, as far as it shows.

    Some rows are read where the data set stores them: in an array or list as long as itself, such
    as the paths of images, in a table of ``datasets``, or in the data sets of a ``Subset`` or
    ``ConcatDataset``. No row is made. None where nothing is stored by which rows differ: a data set
    may make each row anew.
    """
    with contextlib.suppress(Exception):  # a data set may do anything
        found = _rows(data, _DEPTH)
        return None if found is None else digest_of(repr(found).encode())
    return None


def digests_by_field(data: Any) -> list[int]:
    """Return a digest of each array, list or table by which the rows of a data set differ.

    Ranks that share one have the same rows, whatever else they hold beside them. Paths count from
    their common folder on, as ranks may have copies of their own. Empty where nothing is stored.
    """
    if _has_parts(data):
        return []
    with contextlib.suppress(Exception):  # a data set may do anything
        fields = [each for each in _stored(data, len(data), _DEPTH) if each is not None]
        return [digest_of(repr([len(data), *_without_folder(rows)]).encode()) for rows in fields]
    return []


def repeats_rows(sampler: Any) -> bool:
    """Return whether a sampler gives a row several times, to be augmented each time."""
    with contextlib.suppress(Exception):  # a sampler may do anything
        return any(getattr(sampler, name, 1) != 1 for name in ("num_repeats", "repetitions"))
    return False


def _without_folder(rows: Sequence[Any]) -> Sequence[Any]:
    """Return rows with the folder that all of their paths share left out."""
    paths = [row[0] if isinstance(row, list) and row else row for row in rows]
    if not all(isinstance(path, str) and os.sep in path for path in paths):
        return rows
    folder = os.path.commonpath(paths)
    names = [os.path.relpath(path, folder) for path in paths]
    rest = [row[1:] if isinstance(row, list) else [] for row in rows]
    return list(zip(names, rest, strict=True))


def _has_parts(data: Any) -> bool:
    """Return whether the rows of a data set are those of others, or of a table of ``datasets``."""
    of_others = isinstance(data, Subset | ConcatDataset)
    return of_others or type(data).__module__ == "datasets.arrow_dataset"


def _rows(data: Any, depth: int) -> list[Any] | None:
    if not depth:
        return None
    length = len(data)
    if isinstance(data, Subset):
        inner = _rows(data.dataset, depth - 1)
        places = _at(data.indices, _places(length))
        return [length, places, inner] if places and inner is not None else None
    if isinstance(data, ConcatDataset):
        parts = [_rows(part, depth - 1) for part in data.datasets]
        return None if None in parts else parts
    if type(data).__module__ == "datasets.arrow_dataset":
        stored = data.with_format("arrow")[_places(length, _STORED_ROWS)]
        return [length, [column.to_pylist() for column in stored.columns]]
    found = [rows for rows in _stored(data, length, depth) if rows is not None]
    return [length, *found] if found else None


def _stored(data: Any, length: int, depth: int) -> Iterator[list[Any] | None]:
    """Yield rows of what a data set holds that has its length."""
    held = list(vars(data).values()) if hasattr(data, "__dict__") else []
    inside = (value for value in held if isinstance(value, list | tuple) and len(value) < _FIELDS)
    for value in [data, *held, *itertools.chain(*inside)]:
        table = getattr(value, "iloc", None)  # of pandas
        if isinstance(value, np.ndarray | Tensor | list | tuple) or table is not None:
            if len(value) == length:
                rows = _at(value if table is None else table, _places(length))
                # labels are alike in many rows
                yield rows if rows and 2 * len(set(map(repr, rows))) > len(rows) else None
        elif value is not data and hasattr(value, "__getitem__") and _length(value) == length:
            if _has_parts(value):
                yield _rows(value, depth - 1)
            elif depth > 1:
                yield from _stored(value, length, depth - 1)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:
        return None


def _places(length: int, most: int = _ROWS) -> list[int]:
    """Return evenly spaced places, the first and the last among them."""
    return sorted(set(np.linspace(0, length - 1, min(most, length)).astype(int).tolist()))


def _at(values: Any, places: Sequence[int]) -> list[Any]:
    """Return what is at some places; nothing unless its content can be compared."""
    rows = [_plain(values[place]) for place in places]
    return [] if None in rows else rows


def _plain(value: Any) -> Any:
    """Return the content of a value, or a digest of it; None if it has none that ranks share."""
    if isinstance(value, Tensor):
        value = value.detach().numpy() if value.device.type == "cpu" else None
    if isinstance(value, np.ndarray | np.generic):
        flat = np.asarray(value).reshape(-1)
        few = flat[:: flat.size // _ELEMENTS + 1]
        return None if flat.dtype.hasobject else digest_of(few.tobytes())
    if hasattr(value, "iloc"):
        value = value.tolist()
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, str | bytes | bool | int | float) else None
