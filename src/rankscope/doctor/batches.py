"""Reads batches of any structure: who is in them, and how many label tokens."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.capture.labels import IGNORED_LABEL
from rankscope.capture.samples import digest_inputs

_LABELS = ("labels", "label", "targets", "target")


def samples_of(batch: Any) -> list[int] | None:
    """Return one digest per sample of a batch, or None when it cannot be told apart.

    Tensors are digested by content, text and numbers by value. Of a tuple or a mapping the largest
    part counts, among those of as many samples as the first one: labels are the same for many
    samples. In a mapping, what is called a label or a mask counts only if nothing else is there.
    """
    found = _recognised(batch)
    return None if found is None else found[0]


def _recognised(batch: Any) -> tuple[list[int], float] | None:
    """Return one digest per sample, and how many numbers each is made of: without end for text."""
    named = batch if isinstance(batch, Mapping) else {}
    if isinstance(named.get("input_ids"), Tensor):
        samples = _listed(digest_inputs((batch,), {}))
        return (samples, math.inf) if samples else None
    if isinstance(batch, Tensor):
        samples = _listed(digest_inputs((batch,), {}))
        return (samples, batch.numel() / len(samples)) if samples else None
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, Sequence) and batch and all(isinstance(x, str | bytes) for x in batch):
        return [_digest(text) for text in batch], math.inf
    if isinstance(batch, Mapping):
        plain = [part for name, part in batch.items() if not _is_label_or_mask(name)]
        return _largest(plain) or _largest(list(batch.values()))
    return _largest(batch) if isinstance(batch, Sequence) else None


def _largest(parts: Sequence[Any]) -> tuple[list[int], float] | None:
    found = [part for part in map(_recognised, parts) if part is not None]
    alike = [part for part in found if len(part[0]) == len(found[0][0])]
    return max(alike, key=lambda part: part[1], default=None)


def _is_label_or_mask(name: Any) -> bool:
    return isinstance(name, str) and (name.lower() in _LABELS or "mask" in name.lower())


def label_tokens_of(batch: Any) -> int | None:
    """Return the number of label tokens of a batch, or None when it has no labels that are known.

    Labels stand under ``labels`` or a like name, or in the second place of a pair; whole numbers
    count unless they are −100.
    """
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dim() == 0:
        return None
    return int((labels != IGNORED_LABEL).sum())


def _listed(digests: Tensor | None) -> list[int] | None:
    if digests is None:
        return None
    values: list[int] = digests.to(torch.int64).cpu().tolist()
    return values


def _digest(text: str | bytes) -> int:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
