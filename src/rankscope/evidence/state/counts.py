"""Finds buffers that a model's passes count in, and that are rounded or counted twice.

To buffers of 16 bits a forward pass adds, and large ones are rounded. What it adds is a count of
tokens if no element falls, and the sum is a whole number for each token, the same in all readings:
tokens per expert, of which each token takes two, for example. From 256 on, bfloat16 holds no odd
number, float16 none from 2,048 on.

Activation checkpointing runs a part's forward pass once more in the backward pass. Normalisations
over batches in it then count each batch twice.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from rankscope.bus.probe import Awaited, MessagePart
from rankscope.bus.rare import RareProbe
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.passes import tensors_in

_TYPES = (torch.bfloat16, torch.float16)
_READINGS = 3  # that show one number for each token
_CLOSE = 0.01  # relative, of this number: sums of rounded counts
_MOST_ELEMENTS = 1 << 12
_MOST_NORMS = 64  # that are read


def _is_count(for_each: Sequence[float]) -> bool:
    number = round(for_each[0]) if math.isfinite(for_each[0]) else 0
    alike = all(abs(one - number) <= _CLOSE * number for one in for_each)
    return number > 0 and alike and len(for_each) >= _READINGS


class CountsProbe(RareProbe):
    """Reads small buffers of 16 bits around forward passes, in growing distances."""

    def __init__(self, buffers: Mapping[str, tuple[nn.Module, str]], first_step: int) -> None:
        super().__init__(first_step)
        self._buffers = buffers
        self._num_tokens = 0
        self._known: dict[str, list[float]] = {}  # added for each token, in all readings so far

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """Note the number of tokens in the forward pass, where it is due."""
        if not self.due:
            return
        tokens = (t for t in tensors_in([args, kwargs]) if not t.is_floating_point())
        self._num_tokens = next((tensor.numel() for tensor in tokens), 0)

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the buffers before the step's first forward pass, where it is due."""
        if first and self.due:
            present = self._present()
            self.before = {name: (buffer._version, _copy(buffer)) for name, buffer in present}

    def after_forward(self) -> None:
        """Read those that the forward pass has changed."""
        before, self.before = self.before, None
        changes = {
            name: (before[name][1], _copy(buffer))
            for name, buffer in (self._present() if before else ())
            if name in before and before[name][0] != buffer._version
        }
        if changes and self._num_tokens:
            copies = [copy for ends in changes.values() for copy in ends]
            self.pending = Awaited(copies, partial(self._read, changes, self._num_tokens))

    def _read(
        self, changes: Mapping[str, tuple[HostCopy, HostCopy]], num_tokens: int
    ) -> MessagePart:
        """Wait for the device; return each count: name, largest value, whether it began at 0."""
        found = []
        for name, ends in changes.items():
            before, after = (copy.numpy().astype(np.float64) for copy in ends)
            added = after - before
            each = float(added.sum()) / num_tokens if (added >= 0).all() else math.nan
            self._known.setdefault(name, []).append(each)
            largest = float(abs(after).max())
            if _is_count(self._known[name]) and largest < math.inf:
                found.append([name, int(largest), not before.any()])
        return MessagePart(names={"counts": found} if found else {})

    def _present(self) -> list[tuple[str, Tensor]]:
        found = [(name, module._buffers.get(key)) for name, (module, key) in self._buffers.items()]
        return [(name, b) for name, b in found if type(b) is Tensor and b.dtype in _TYPES]


def _copy(buffer: Tensor) -> HostCopy:
    return HostCopy(buffer.detach().float(), own=True)


def make_counts_probe(module: nn.Module, first_step: int) -> CountsProbe | None:
    """Return the probe of a model's counts; None where it has no buffers of 16 bits."""
    buffers = {
        _name_of(f"{prefix}.{key}" if prefix else key, buffer): (part, key)
        for prefix, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if type(buffer) is Tensor and buffer.dtype in _TYPES and buffer.numel() <= _MOST_ELEMENTS
    }
    return CountsProbe(buffers, first_step) if buffers else None


def _name_of(path: str, buffer: Tensor) -> str:
    """Return the name of a count in the record, with its type: ``counts in bfloat16``."""
    return f"{canonical_name(path)} in {str(buffer.dtype).removeprefix('torch.')}"


class RecomputedProbe(RareProbe):
    """Reads how many batches normalisations have counted, around backward passes."""

    def __init__(self, norms: Sequence[tuple[str, nn.Module]], first_step: int) -> None:
        super().__init__(first_step)
        self._norms = norms

    def after_forward(self) -> None:
        """Read them at the end of a forward pass; the step's last one counts."""
        if self.due:
            self.before = self._counts()

    def see_reduced(self) -> None:
        """Read them at the end of the backward pass."""
        before, self.before = self.before, None
        after = None if before is None else self._counts()
        if before is not None and after is not None:
            self.pending = Awaited([before, after], partial(self._read, before, after))

    def _read(self, before: HostCopy, after: HostCopy) -> MessagePart:
        """Wait for the device; return the names of the normalisations that have moved."""
        moved = before.numpy() != after.numpy()
        names = [name for (name, _), is_moved in zip(self._norms, moved, strict=True) if is_moved]
        return MessagePart(names={"recomputed": names} if names else {})

    def _counts(self) -> HostCopy | None:
        buffers = [module._buffers.get("num_batches_tracked") for _, module in self._norms]
        counts = [buffer.detach().reshape(()) for buffer in buffers if buffer is not None]
        return HostCopy(torch.stack(counts), own=True) if len(counts) == len(buffers) else None


def make_recomputed_probe(module: nn.Module, first_step: int) -> RecomputedProbe | None:
    """Return the probe of a model's running statistics; None where it has none."""
    norms = [
        (canonical_name(name), part)
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and isinstance(part.num_batches_tracked, Tensor)
    ]
    return RecomputedProbe(norms[:_MOST_NORMS], first_step) if norms else None
