"""Which samples a worker trains on: ids that it is given, or digests of what enters the model.

A content digest is position-aware and blind to padding: with an attention mask, the same text
has the same digest whether it was padded on the left, on the right, or not at all.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.capture.host import HostCopy
from rankscope.errors import UsageError

MAX_WORDS = 16_384
"""Words of one sample that enter its digest; larger samples are read at a regular stride."""

_MIX = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as a signed number


class SampleMeter:
    """Collects the samples of one step on one worker; ids that are given win over digests."""

    def __init__(self) -> None:
        self._given: list[tuple[int, HostCopy | NDArray[np.int64]]] = []
        self._seen: list[tuple[int, HostCopy | NDArray[np.int64]]] = []

    def give(self, samples: object, forward: int = 0) -> None:
        """Take ids (integers or strings, in any sequence) or the tensors of a batch.

        Args:
            samples: Ids or tensors.
            forward: Number of the forward pass that they enter.

        Raises:
            UsageError: ``samples`` is neither.
        """
        if isinstance(samples, Mapping) or (isinstance(samples, Tensor) and _is_content(samples)):
            digests = digest_inputs((samples,), {})
            if digests is not None:
                self._given.append((forward, HostCopy(digests)))
        elif isinstance(samples, Tensor):
            self._given.append((forward, HostCopy(samples.to(torch.int64).reshape(-1))))
        else:
            self._given.append((forward, _ids(samples)))

    def see(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """Digest the inputs of a forward pass, unless ids were given for this step."""
        if self._given:
            return
        digests = digest_inputs(args, kwargs)
        if digests is not None:
            self._seen.append((forward, HostCopy(digests)))

    @property
    def named(self) -> bool:
        """Whether the training gave ids in this step."""
        return bool(self._given)

    def collect(self, idle: Container[int] = ()) -> list[HostCopy | NDArray[np.int64]]:
        """Return what was collected since the last call, and start again.

        Args:
            idle: Numbers of forward passes that do not count.
        """
        collected = self._given or self._seen
        self._given, self._seen = [], []
        return [part for forward, part in collected if forward not in idle]


def to_array(collected: Sequence[HostCopy | NDArray[np.int64]]) -> NDArray[np.int64]:
    """Join what a :class:`SampleMeter` collected into one int64 array; waits for the device."""
    arrays = [part.numpy() if isinstance(part, HostCopy) else part for part in collected]
    if not arrays:
        return np.empty(0, np.int64)
    return np.concatenate(arrays).astype(np.int64, copy=False)


@torch.no_grad()
def digest_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return one digest per sample of a batch, or None when no batch can be recognised.

    Args:
        args: Positional inputs of the model.
        kwargs: Named inputs of the model; ``input_ids`` and ``attention_mask`` are recognised.

    Returns:
        int64 ``[B]``, on the inputs' device.
    """
    batch, mask = _find_batch(args, kwargs)
    if batch is None or batch.dim() == 0 or batch.shape[0] == 0:
        return None
    rows = _words(batch)
    if mask is None or mask.shape != batch.shape:
        rows = rows[:, :: -(-rows.shape[1] // MAX_WORDS)]
        total = ((rows + 1) * _weights(rows.device)[: rows.shape[1]]).sum(1)
    else:
        present = (mask != 0).to(torch.int64)
        position = (present.cumsum(1) - 1).clamp_(min=0) % MAX_WORDS
        total = ((rows + 1) * _weights(rows.device)[position] * present).sum(1)
    total = (total ^ (total >> 29)) * _MIX
    return total ^ (total >> 32)


def _find_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    named = dict(kwargs)
    for arg in args:
        if isinstance(arg, Mapping):
            named = {**arg, **named}
    mask = named.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) else None
    ids = named.get("input_ids")
    if isinstance(ids, Tensor):
        return ids, mask
    for value in (*args, *named.values()):
        if isinstance(value, Tensor) and not value.is_sparse:
            return value, None
    return None, None


def _words(batch: Tensor) -> Tensor:
    """Return int64 ``[B, n]``: the bits of each sample's elements."""
    rows = batch.detach().reshape(batch.shape[0], -1)
    if rows.is_complex():
        rows = torch.view_as_real(rows).reshape(batch.shape[0], -1)
    if rows.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        rows = rows.contiguous().view(integer[rows.element_size()])
    return rows.to(torch.int64)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return one odd random weight per position, the same on every worker."""
    generator = torch.Generator().manual_seed(0x5EED)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return (torch.randint(low, high, (MAX_WORDS,), generator=generator) | 1).to(device)


def _is_content(tensor: Tensor) -> bool:
    return tensor.dim() > 1 or tensor.is_floating_point()


def _ids(samples: object) -> NDArray[np.int64]:
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "iu":
        return samples.astype(np.int64).reshape(-1)
    if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes)):
        return np.array([_id(sample) for sample in samples], np.int64)
    raise UsageError(
        f"batch() expected ids (integers or strings) or the tensors of a batch, "
        f"got {type(samples).__name__}; pass one id per sample"
    )


def _id(sample: object) -> int:
    if isinstance(sample, (int, np.integer)):
        return int(sample)
    if isinstance(sample, Tensor) and sample.numel() == 1:
        return int(sample)
    if isinstance(sample, str):
        digest = hashlib.blake2b(sample.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)
    raise UsageError(
        f"batch() expected integers or strings as ids, got {type(sample).__name__}; "
        "pass one id per sample"
    )
