"""Finds counts in buffers of 16 bits: a forward pass adds to them, and large ones are rounded.

What a forward pass adds is a count of tokens if no element falls, and the sum is a whole number for
each token, the same in all readings: tokens per expert, of which each token takes two, for example.
From 256 on, bfloat16 holds no odd number, float16 none from 2,048 on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.bus.probe import MessagePart
from rankscope.bus.rare import RareProbe
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.passes import tensors_in

_TYPES = (torch.bfloat16, torch.float16)
_READINGS = 3  # that show one number for each token
_CLOSE = 0.01  # relative, of this number: sums of rounded counts
_MOST_ELEMENTS = 1 << 12


@dataclass(frozen=True, slots=True)
class _Change:
    """A buffer before and after a forward pass, on its way to the host."""

    name: str
    before: HostCopy
    after: HostCopy


class _Counted:
    """Buffers that a forward pass has changed, on their way to the host."""

    def __init__(
        self, changes: Sequence[_Change], num_tokens: int, known: dict[str, list[float]]
    ) -> None:
        self._changes = changes
        self._num_tokens = num_tokens
        self._known = known  # what was added for each token, in all readings so far

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(one.before.ready and one.after.ready for one in self._changes)

    def read(self) -> MessagePart:
        """Wait for the device; return each count: name, largest value, whether it began at 0."""
        found = []
        for one in self._changes:
            before = one.before.numpy().astype(np.float64)
            after = one.after.numpy().astype(np.float64)
            added = after - before
            each = float(added.sum()) / self._num_tokens if (added >= 0).all() else math.nan
            self._known.setdefault(one.name, []).append(each)
            largest = float(abs(after).max())
            if _is_count(self._known[one.name]) and largest < math.inf:
                found.append([one.name, int(largest), not before.any()])
        return MessagePart(names={"counts": found} if found else {})


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
        self._before: dict[str, tuple[int, HostCopy]] = {}
        self._known: dict[str, list[float]] = {}

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
            self._before = {name: (buffer._version, _copy(buffer)) for name, buffer in present}

    def after_forward(self) -> None:
        """Read those that the forward pass has changed."""
        before, self._before = self._before, {}
        changes = [
            _Change(name, before[name][1], _copy(buffer))
            for name, buffer in (self._present() if before else ())
            if name in before and before[name][0] != buffer._version
        ]
        if changes and self._num_tokens:
            self.pending = _Counted(changes, self._num_tokens, self._known)

    def _present(self) -> list[tuple[str, Tensor]]:
        found = [(name, module._buffers.get(key)) for name, (module, key) in self._buffers.items()]
        return [(name, b) for name, b in found if type(b) is Tensor and b.dtype in _TYPES]

    def abort(self) -> None:
        """Forget a step that was never finished."""
        super().abort()
        self._before = {}


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
