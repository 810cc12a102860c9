"""The identity of samples: the batch among a model's inputs, and numbers for ids.

The batch is found in any structure, without reading it. Equal ids have equal numbers on all workers
and in every run.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.errors import UsageError

_DEPTH = 5
_BREADTH = 256
_MOST = 4096
_CHANNELS = (1, 3, 4)
_VAGUE = ("label", "target", "mask")

Items = Sequence[Any]


def find_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor | Items | None, Tensor | None]:
    """Return the inputs that identify samples, and their attention mask if they have one.

    That is ``input_ids``, with ``attention_mask`` beside it, in any mapping or dataclass; else the
    first tensor with a batch dimension, or list with one tensor per sample; else the first list of
    texts. Of named parts, those with a label, target or mask in the name come last: many samples
    share a label. The result is a tensor ``[B, ...]``, a list of one tensor or text per sample, or
    None.
    """
    named = dict(kwargs)
    for arg in args:
        if isinstance(arg, Mapping):
            named = {**arg, **named}
    for part in _parts_of([named, *args]):
        members = _members(part)
        ids = members.get("input_ids")
        mask = members.get("attention_mask")
        if isinstance(ids, Tensor) and _has_samples(ids):
            return ids, mask if isinstance(mask, Tensor) and is_dense(mask) else None
    values = [*args, *_by_name(named)]
    for part in _parts_of(values):
        if isinstance(part, Tensor) and _has_samples(part):
            return part, None
        if items := items_in(part):
            return items, None
    texts = (part for part in _parts_of(values) if _are_texts(part))
    return next(texts, None), None


def items_in(value: object) -> Sequence[Tensor]:
    """Return the tensors of a list that has one per sample; nothing of other values.

    Images ``[channels, height, width]``, or sequences ``[length]`` of different lengths.
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], Tensor):
        return ()
    if all(map(_is_image, value)):
        return value
    sequences = all(isinstance(v, Tensor) and is_dense(v) and v.dim() == 1 for v in value)
    return value if sequences and len({len(v) for v in value}) > 1 else ()


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has its elements at hand: no sparse, nested or sharded one."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _has_samples(tensor: Tensor) -> bool:
    return is_dense(tensor) and tensor.dim() > 0 and tensor.shape[0] > 0


def _is_image(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and is_dense(value)
        and value.dim() == 3
        and value.shape[0] in _CHANNELS
        and (value.is_floating_point() or value.dtype is torch.uint8)
    )


def _are_texts(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(text, (str, bytes)) for text in value)


def _parts_of(values: Iterable[Any]) -> Iterable[Any]:
    """Yield values and their contents, in order, up to a depth and a number."""
    return islice(_nested(values, _DEPTH), _MOST)


def _nested(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in islice(values, _BREADTH):
        yield value
        if depth:
            held = value if isinstance(value, (list, tuple)) else _by_name(_members(value))
            yield from _nested(held, depth - 1)


def _by_name(members: Mapping[Any, Any]) -> list[Any]:
    """Return the values of named parts; labels, targets and masks last."""

    def is_vague(item: tuple[Any, Any]) -> bool:
        name = item[0]
        return isinstance(name, str) and any(word in name.lower() for word in _VAGUE)

    return [value for _, value in sorted(islice(members.items(), _BREADTH), key=is_vague)]


def _members(value: object) -> Mapping[Any, Any]:
    """Return the named parts of a mapping or dataclass."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return {}


_LOWEST = -(1 << 63)
_HIGHEST = (1 << 63) - 1


def ids_of(samples: object) -> NDArray[np.int64]:
    """Return one number per id; UsageError where one has no content that all workers see alike.

    Integers stand for themselves; text, bytes, UUIDs, dates, paths, and tuples of these are
    digested.
    """
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "iu":
        return samples.astype(np.int64).reshape(-1)
    if isinstance(samples, np.ndarray):
        samples = samples.reshape(-1).tolist()
    if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, Mapping)):
        return np.array([_number(sample) for sample in samples], np.int64)
    raise UsageError(
        f"batch() expected ids (numbers, text, UUIDs, tuples) or the tensors of a batch, "
        f"got {type(samples).__name__}; pass one id per sample"
    )


def digests_of_texts(texts: Sequence[str | bytes]) -> NDArray[np.int64]:
    """Return one digest per text."""
    return np.array([_digest(_content(text)) for text in texts], np.int64)


def _number(sample: Any) -> int:
    if isinstance(sample, (np.generic, np.ndarray)) and sample.ndim == 0:
        sample = sample.item()
    if isinstance(sample, Tensor) and sample.numel() == 1:
        sample = sample.item()
    if isinstance(sample, float) and sample.is_integer():
        sample = int(sample)
    if isinstance(sample, int) and _LOWEST < sample <= _HIGHEST:
        return int(sample)
    return _digest(_content(sample))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _content(sample: Any) -> bytes:
    """Return the content of an id as bytes."""
    if isinstance(sample, str):
        return sample.encode("utf-8", "surrogatepass")
    if isinstance(sample, bytes):
        return b"\0bytes " + sample
    if isinstance(sample, np.ndarray):
        sample = sample.tolist()
    if isinstance(sample, (tuple, list)):
        numbers = np.array([_number(part) for part in sample], np.int64)
        return b"\0tuple " + numbers.tobytes()
    kind: type[object] = type(sample)
    shows_address = kind.__repr__ is object.__repr__ or callable(sample)
    problem = ""
    if sample is None or isinstance(sample, (Mapping, Set, Tensor)) or shows_address:
        problem = f"got {type(sample).__name__}"
    elif isinstance(sample, float) and math.isnan(sample):
        problem = "NaN is no id"
    if problem:
        raise UsageError(
            f"batch() expected numbers, text, UUIDs or tuples of these as ids, {problem}; "
            "pass one id per sample"
        )
    return f"\0{type(sample).__qualname__} {sample!r}".encode("utf-8", "surrogatepass")
