"""Whether a data loader draws with replacement: then workers share samples on purpose."""

from collections import deque
from collections.abc import Iterator
from typing import Any

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


def draws_with_replacement(loader: Any) -> bool:
    """Return whether a data loader says that it draws samples, or whole shards, with replacement.

    So say torch's samplers with ``replacement=True``, and webdataset's ``ResampledShards``
    (``WebDataset(resampled=True)``) or a class of that name. Nothing is read or called.

    Args:
        loader: A data loader, or whatever the training reads its batches from; None if unknown.
    """
    waiting, visited = deque([loader]), 0
    while waiting and visited < _MAX_VISITED:
        part = waiting.popleft()
        visited += 1
        if _replaces(part):
            return True
        waiting.extend(_parts_of(part))
    return False


def _replaces(part: Any) -> bool:
    if any(kind.__name__.startswith("ResampledShards") for kind in type(part).__mro__):
        return True
    return _attribute(part, "replacement") is True


def _parts_of(part: Any) -> Iterator[Any]:
    for name in _PARTS:
        value = _attribute(part, name)
        if value is not None:  # a list is the data themselves, and has no parts
            yield value
    for name in _LISTS_OF_PARTS:
        value = _attribute(part, name)
        if isinstance(value, list | tuple):
            yield from value


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # a property may do anything
        return None
