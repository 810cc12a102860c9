"""Reads a batch on the host in C: where a model is small, a few operations of torch take longer."""

import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rankscope.gradients.kernels.library import NoLibraryError, compiled

_MASKS = {torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4, torch.int64: 8}


def count_labels(labels: Tensor, ignored: int, *, first: int) -> int | None:
    """Return how many labels count.

    Args:
        labels: ``[..., n]``.
        ignored: The value of labels that do not count.
        first: Place of the first that counts in each sequence.

    Returns:
        Their number; None if these labels are not for this function.
    """
    counts = _function("labels")
    if counts is None or not _is_plain(labels) or not labels.dim():
        return None
    length = labels.shape[-1]
    rows = labels.numel() // length if length else 0
    count: int = counts(labels.data_ptr(), rows, length, first, ignored)
    return count


def digest_samples(
    batch: Tensor, mask: Tensor | None, weights: int, places: int, mix: int
) -> "array[int] | None":
    """Return a digest of each sample: a sum of its words, each times a weight by its place.

    Args:
        batch: ``[B, n]``.
        mask: Which words count ``[B, n]``; None if all do.
        weights: Address of int64 ``[places]``.
        places: How many there are.
        mix: An odd number, as int64.

    Returns:
        int64 ``[B]``; None if this batch is not for this function.
    """
    digest = _function("samples")
    if digest is None or not _is_plain(batch) or batch.dim() != 2:
        return None
    samples, length = batch.shape
    address = None
    size = 0
    if mask is not None:
        size = _MASKS.get(mask.dtype, 0)
        if not size or not mask.is_cpu or not mask.is_contiguous():
            return None
        address = mask.data_ptr()
    elif length > places:
        return None
    digests = array("q", bytes(8 * samples))
    digest(
        batch.data_ptr(), address, size, samples, length, weights, places, mix,
        digests.buffer_info()[0],
    )  # fmt: skip
    return digests


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.dtype is torch.int64
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    try:
        return compiled(name, holding_lock=True)
    except NoLibraryError:
        return None
