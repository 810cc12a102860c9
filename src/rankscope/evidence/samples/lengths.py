"""The length of the token sequences that enter a model, and their share of padding."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.evidence.samples.batches import is_dense
from rankscope.gradients.host import Numbers, copy_numbers
from rankscope.gradients.kernels.inputs import count_labels


class _Seen(NamedTuple):
    forward: int
    samples: int
    tokens: int
    present: Numbers | int | None  # tokens that the mask keeps; None without a mask


class Lengths:
    """The lengths of one step; counts of a mask may still be on the device."""

    def __init__(self, seen: Sequence[_Seen]) -> None:
        self._seen = seen

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return all(
            s.present is None or isinstance(s.present, int) or s.present.ready for s in self._seen
        )

    def read(self) -> dict[str, float]:
        """Wait for the device; return ``sequence_length`` and ``padding``, as far as known."""
        samples = sum(seen.samples for seen in self._seen)
        tokens = sum(seen.tokens for seen in self._seen)
        if not samples or not tokens:
            return {}
        values = {"sequence_length": tokens / samples}
        present = [_number(seen.present) for seen in self._seen if seen.present is not None]
        if len(present) == len(self._seen):
            values["padding"] = 1 - sum(present) / tokens
        return values


class LengthMeter:
    """Collects the lengths of one step on one worker."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    @torch.no_grad()
    def see(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """Read the inputs of a forward pass: token ids ``[B, n]``, and their mask if there is one.

        They are searched by their usual names, in a first mapping, and in the first position.
        """
        first = args[0] if args else None
        named = first if isinstance(first, Mapping) and "input_ids" in first else kwargs
        ids = named.get("input_ids", first)
        mask = named.get("attention_mask")
        if not _are_ids(ids):
            return
        fits = isinstance(mask, Tensor) and is_dense(mask) and mask.shape == ids.shape
        present = _count(mask) if fits else None
        self._seen.append(_Seen(forward, ids.shape[0], ids.numel(), present))

    def collect(self, idle: Container[int] = ()) -> Lengths:
        """Return the lengths since the last call, without those of ``idle`` forward passes."""
        seen = self._seen
        self._seen = []
        return Lengths([one for one in seen if one.forward not in idle])


def _are_ids(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() != 2 or not is_dense(value):
        return False
    return value.dtype in (torch.int64, torch.int32)


def _count(mask: Any) -> Numbers | int:
    count = count_labels(mask, 0, first=0)
    return copy_numbers((mask != 0).sum(), torch.int64, own=True) if count is None else count


def _number(present: Numbers | int) -> float:
    return present if isinstance(present, int) else float(present.numpy())
