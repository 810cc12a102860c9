"""Reads batches of any structure: who is in them, and how many label tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.capture.loss import IGNORED_LABEL
from rankscope.capture.samples import digest_inputs

_LABELS = ("labels", "label", "targets", "target")


def samples_of(batch: Any) -> list[int] | None:
    """Return one digest per sample of a batch, or None when it cannot be told apart.

    Tensors are digested by content, text and numbers by value; of a tuple or a mapping the first
    part counts in which samples are recognised.
    """
    named = batch if isinstance(batch, Mapping) else {}
    if any(isinstance(named.get(name), Tensor) for name in ("input_ids",)):
        return _listed(digest_inputs((batch,), {}))
    if isinstance(batch, Tensor):
        return _listed(digest_inputs((batch,), {}))
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, Sequence) and batch and all(isinstance(x, str | bytes) for x in batch):
        return [_digest(text) for text in batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(parts, Sequence) and not isinstance(batch, Mapping):
        return None
    found = (samples_of(part) for part in parts)
    return next((samples for samples in found if samples), None)


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
