"""Finds counts in buffers of 16 bits: a forward pass adds to them, and large ones are rounded.

A buffer counts if all of its small values are whole numbers wherever it was read. From 256 on,
bfloat16 holds no odd number, float16 none from 2,048 on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope.bus.probe import MessagePart, Probe, StepEnd
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name

EXACT = {torch.bfloat16: 256, torch.float16: 2048}
"""Up to where each type holds all whole numbers."""

_SMALL = 128  # up to here, a value of either type that is whole is so for a reason
_FEWEST = 4  # such values, not 0, that show a count
_MOST_ELEMENTS = 1 << 12


@dataclass(frozen=True, slots=True)
class _Counted:
    """Buffers that a forward pass has changed, on their way to the host."""

    names: Sequence[str]
    limits: Sequence[int]
    copies: Sequence[HostCopy]
    known: dict[str, float]  # small whole numbers that each has held so far; updated by ``read``

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(copy.ready for copy in self.copies)

    def read(self) -> MessagePart:
        """Wait for the device; return name and largest value of the counts beyond their limits."""
        found = []
        for name, limit, copy in zip(self.names, self.limits, self.copies, strict=True):
            values = copy.numpy()
            small = values[(abs(values) < _SMALL) & (values != 0)]
            whole = len(small) if (small == small.round()).all() else -math.inf
            self.known[name] = self.known.get(name, 0) + whole
            largest = abs(values).max()
            if self.known[name] >= _FEWEST and limit <= largest < math.inf:
                found.append([name, int(largest)])
        return MessagePart(names={"counts": found} if found else {})


class CountsProbe(Probe):
    """Reads small buffers of 16 bits that a forward pass changes, in growing distances."""

    def __init__(self, buffers: Mapping[str, tuple[nn.Module, str]], first_step: int) -> None:
        self._buffers = buffers
        self._first_step = first_step
        self._versions: dict[str, int] = {}
        self._known: dict[str, float] = {}
        self._pending: _Counted | None = None

    def before_forward(self, step: int, *, first: bool) -> None:
        """Note the buffers before the step's first forward pass, where it is due."""
        age = step - self._first_step
        if first and age & (age - 1) == 0:
            self._versions = {name: buffer._version for name, buffer in self._present()}

    def after_forward(self) -> None:
        """Read those that the forward pass has changed."""
        versions, self._versions = self._versions, {}
        changed = [
            (name, buffer)
            for name, buffer in (self._present() if versions else ())
            if versions.get(name, buffer._version) != buffer._version
        ]
        if changed:
            self._pending = _Counted(
                [name for name, _ in changed],
                [EXACT[buffer.dtype] for _, buffer in changed],
                [HostCopy(buffer.detach().float(), own=True) for _, buffer in changed],
                self._known,
            )

    def _present(self) -> list[tuple[str, Tensor]]:
        found = [(name, module._buffers.get(key)) for name, (module, key) in self._buffers.items()]
        return [(name, b) for name, b in found if type(b) is Tensor and b.dtype in EXACT]

    def collect(self, end: StepEnd) -> _Counted | None:
        """Return what was read in this step."""
        pending, self._pending = self._pending, None
        return pending

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._pending = None


def make_counts_probe(module: nn.Module, first_step: int) -> CountsProbe | None:
    """Return the probe of a model's counts; None where it has no such buffers."""
    buffers = {
        canonical_name(f"{prefix}.{key}" if prefix else key): (part, key)
        for prefix, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if type(buffer) is Tensor and buffer.dtype in EXACT and buffer.numel() <= _MOST_ELEMENTS
    }
    return CountsProbe(buffers, first_step) if buffers else None
