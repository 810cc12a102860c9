"""A training's data loader and data set, by what they show of themselves; nothing is drawn.

Digests of rows show whether those of several ranks are the same, in one order.
"""

import contextlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from rankscope.stats.arrays import digest_of
from rankscope.wrappers.living import live_objects

_ROWS = 64  # that are looked at
_STORED_ROWS = 16  # of a table of ``datasets``, which lie in files
_DEPTH = 3  # data sets inside of others
_ELEMENTS = 4096  # of a row that are read
_FIELDS = 16  # arrays in one list of a data set, as in TensorDataset
_SAMPLER_SETTINGS = ("shuffle", "seed", "drop_last", "replacement")
_LOADER_SETTINGS = ("batch_size", "num_workers", "drop_last", "prefetch_factor", "pin_memory")
_PARTS = (
    "base_dataloader",  # accelerate's wrapper
    "batch_sampler",
    "sampler",
    "dataset",
    "source",
)
_LISTS_OF_PARTS = (
    "datasets",  # torch's ConcatDataset and ChainDataset
    "pipeline",  # webdataset's stages, its loader's included
)
_MAX_VISITED = 64


def quietly(collect: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return facts, or none if reading them fails: a job must not fail to start for them."""
    try:
        return collect()
    except Exception:
        return {}


def settings_of(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of an object that are numbers or words, by name."""
    found = {name: _quietly_of(owner, name) for name in names}
    return {name: v for name, v in found.items() if isinstance(v, bool | int | float | str)}


def _quietly_of(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # a property may do anything
        return None


def class_of(thing: object) -> str:
    """Return the name of an object's class, with its module."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def data_facts(loader: Any) -> dict[str, Any]:
    """Return what ranks compare of the data; without a loader, of the living ones."""
    splitting = splitting_loader() if loader is None else loader
    return {
        "sampler_seed": sampler_seed(splitting),
        "with_replacement": draws_with_replacement(splitting),
        "data_splits": splits_of(splitting),
        "data_order": order_of(splitting),
        "data_length": length_of(loader),
        "data_rows": rows_of(loader),
        "data_digest": data_digest_of(splitting),
        "data_fields": data_fields_of(splitting),
    }


def loader_facts(loader: Any) -> dict[str, Any]:
    """Return the facts of a data loader, its samplers and its data set."""
    facts: dict[str, Any] = {"class": class_of(loader), **settings_of(loader, _LOADER_SETTINGS)}
    for name in ("sampler", "batch_sampler"):
        sampler = _quietly_of(loader, name)
        if sampler is not None:
            facts[name] = {"class": class_of(sampler), **settings_of(sampler, _SAMPLER_SETTINGS)}
    data: Any = _quietly_of(loader, "dataset")
    if data is not None:
        facts["dataset"] = {"class": class_of(data), **quietly(lambda: {"length": len(data)})}
    generator = _quietly_of(loader, "generator")
    if isinstance(generator, torch.Generator):
        facts["seed"] = generator.initial_seed()
    return facts


def sampler_seed(loader: Any) -> int | None:
    """Return the seed with which a data loader's samples are shuffled; None if unknown.

    That of a sampler with a ``seed`` (``DistributedSampler``) or ``initial_seed`` (accelerate's),
    unless it does not shuffle, or of the generator that torch's own samplers draw from.
    """
    if loader is None or _quietly_of(loader, "synchronized_generator") is not None:
        return None  # accelerate gives all ranks the generator of rank 0 with each pass
    batches = _quietly_of(loader, "batch_sampler")
    batches = _quietly_of(batches, "batch_sampler") or batches  # inside accelerate's share of it
    for sampler in (_quietly_of(loader, "sampler"), _quietly_of(batches, "sampler"), batches):
        if sampler is None or _quietly_of(sampler, "shuffle") is False:
            continue
        for name in ("seed", "initial_seed"):
            seed = _quietly_of(sampler, name)
            if isinstance(seed, int) and not isinstance(seed, bool):
                return seed
        generator = _quietly_of(sampler, "generator")
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return None


def draws_with_replacement(loader: Any) -> bool:
    """Return whether a data loader declares that it draws samples, or shards, with replacement.

    That is torch's samplers with ``replacement=True``, those of repeated augmentation, and
    webdataset's ``ResampledShards`` (``WebDataset(resampled=True)``) or a class of that name.
    """
    return any(map(_replaces, _inside(loader)))


def splits_of(loader: Any) -> list[tuple[str, int]]:
    """Return what in a data loader gives each rank a part of the data, and into how many parts.

    That is a sampler or data set with ``num_replicas`` and ``rank`` (``DistributedSampler``) or
    ``num_processes`` and ``process_index`` (accelerate's), one that ``split_dataset_by_node`` of
    ``datasets`` has made, and accelerate's loader that deals out what rank 0 reads.
    """
    found: dict[int, tuple[str, int]] = {}
    for part in _inside(loader):
        number = _parts_made_by(part)
        if number is not None and number > 1:
            found[id(part)] = (type(part).__name__, number)
    return list(found.values())


def splitting_loader() -> Any:
    """Return the living data loader that splits its data into the most parts; None without any.

    Of several, that of the most rows, as a data set for evaluation has fewer.
    """

    def size(loader: Any) -> tuple[int, int]:
        return math.prod(n for _, n in splits_of(loader)), rows_of(loader) or 0

    loaders = [each for each in live_objects(DataLoader)[DataLoader] if splits_of(each)]
    return max(loaders, key=size, default=None)


def _parts_made_by(part: Any) -> int | None:
    for number, place in (("num_replicas", "rank"), ("num_processes", "process_index")):
        found = _quietly_of(part, number), _quietly_of(part, place)
        if all(isinstance(one, int) for one in found):
            return int(found[0])
    by_node = _quietly_of(_quietly_of(part, "_distributed"), "world_size")
    if isinstance(by_node, int):
        return by_node
    if type(part).__name__ == "DataLoaderDispatcher":
        dealt = _quietly_of(_quietly_of(part, "state"), "num_processes")
        return dealt if isinstance(dealt, int) else None
    return None


def order_of(loader: Any) -> str:
    """Return what decides the order of a loader's data; empty if unknown.

    "nothing" where it does not shuffle, "set_epoch" where a part has that method, "generator" where
    torch's ``RandomSampler`` draws.
    """
    parts = list(_inside(loader))
    samplers = [part for part in parts if isinstance(part, Sampler)]
    if any(type(s) is SequentialSampler or _quietly_of(s, "shuffle") is False for s in samplers):
        return "nothing"
    if any(callable(_quietly_of(part, "set_epoch")) for part in parts[1:]):
        return "set_epoch"
    return "generator" if any(type(sampler) is RandomSampler for sampler in samplers) else ""


def length_of(loader: Any) -> int | None:
    """Return how many samples a loader's iterable data set has, by its own word, if known."""
    known = []
    for part in _inside(loader):
        if isinstance(part, IterableDataset):
            with contextlib.suppress(Exception):  # most have no length
                known.append(len(part))  # type: ignore[arg-type]
    return max(known, default=None)


def rows_of(loader: Any) -> int | None:
    """Return how many rows the data set of a loader has; without one, those of all living loaders.

    None where a data set is iterable: it may yield any number of rows.
    """
    loaders = live_objects(DataLoader)[DataLoader] if loader is None else [loader]
    sets = {id(data): data for data in (_quietly_of(each, "dataset") for each in loaders)}
    rows = []
    for data in sets.values():
        if data is None or isinstance(data, IterableDataset):
            return None
        with contextlib.suppress(Exception):  # some have no length
            rows.append(len(data))
    return sum(rows) or None


_PLACES = 4096


def data_digest_of(loader: Any) -> int | None:
    """Return a digest of which rows a loader's data set has, as far as none has to be made.

    Of a ``torch.utils.data.Subset``, that is its places, some thousands of them; of a table of
    ``datasets``, the first and the last row as they are stored. None of others.
    """
    for part in _inside(loader):
        with contextlib.suppress(Exception):
            if isinstance(part, Subset):
                places = part.indices
                few = range(0, len(places), len(places) // _PLACES + 1)
                return digest_of(repr([len(places), *(places[at] for at in few)]).encode())
            if type(part).__module__ == "datasets.arrow_dataset":
                stored = part.with_format("arrow")
                ends = [stored[at].to_pydict() for at in (0, len(part) - 1)]
                return digest_of(repr(ends).encode())
    return None


def data_fields_of(loader: Any) -> list[int]:
    """Return digests of what the data set of a loader stores of its rows: one that ranks share."""
    return digests_by_field(_quietly_of(loader, "dataset"))


def _inside(loader: Any) -> Iterator[Any]:
    """Yield a loader and its parts, each once; nothing of them is read or called."""
    waiting = deque([loader])
    visited: set[int] = set()
    while waiting and len(visited) < _MAX_VISITED:
        part = waiting.popleft()
        if part is not None and id(part) not in visited:
            visited.add(id(part))
            yield part
            waiting.extend(_parts_of(part))


def _replaces(part: Any) -> bool:
    if any(kind.__name__.startswith("ResampledShards") for kind in type(part).__mro__):
        return True
    if isinstance(part, Sampler) and repeats_rows(part):
        return True
    return _quietly_of(part, "replacement") is True


def _parts_of(part: Any) -> Iterator[Any]:
    for name in _PARTS:
        value = _quietly_of(part, name)
        if value is not None:  # a list is the data themselves, and has no parts
            yield value
    for name in _LISTS_OF_PARTS:
        value = _quietly_of(part, name)
        if isinstance(value, list | tuple):
            yield from value


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
