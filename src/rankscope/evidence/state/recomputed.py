"""Finds running statistics that a backward pass moves, as recomputation does.

Activation checkpointing runs a part's forward pass once more in the backward pass. Normalisations
over batches in it then count each batch twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from rankscope.bus.probe import MessagePart
from rankscope.bus.rare import RareProbe
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name

_MOST = 64  # normalisations that are read


@dataclass(frozen=True, slots=True)
class _Moved:
    """Numbers of batches before and after a backward pass, on their way to the host."""

    names: Sequence[str]
    before: HostCopy
    after: HostCopy

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self.before.ready and self.after.ready

    def read(self) -> MessagePart:
        """Wait for the device; return the names of the normalisations that have moved."""
        moved = self.before.numpy() != self.after.numpy()
        names = [name for name, has_moved in zip(self.names, moved, strict=True) if has_moved]
        return MessagePart(names={"recomputed": names} if names else {})


class RecomputedProbe(RareProbe):
    """Reads how many batches normalisations have counted, around backward passes now and then."""

    def __init__(self, norms: Sequence[tuple[str, nn.Module]], first_step: int) -> None:
        super().__init__(first_step)
        self._norms = norms
        self._before: HostCopy | None = None

    def after_forward(self) -> None:
        """Read them at the end of a forward pass; the step's last one counts."""
        if self.due:
            self._before = self._counts()

    def see_reduced(self) -> None:
        """Read them at the end of the backward pass."""
        before, self._before = self._before, None
        after = None if before is None else self._counts()
        if before is not None and after is not None:
            self.pending = _Moved([name for name, _ in self._norms], before, after)

    def _counts(self) -> HostCopy | None:
        buffers = [module._buffers.get("num_batches_tracked") for _, module in self._norms]
        counts = [buffer.detach().reshape(()) for buffer in buffers if buffer is not None]
        return HostCopy(torch.stack(counts), own=True) if len(counts) == len(buffers) else None

    def abort(self) -> None:
        """Forget a step that was never finished."""
        super().abort()
        self._before = None


def make_recomputed_probe(module: nn.Module, first_step: int) -> RecomputedProbe | None:
    """Return the probe of a model's running statistics; None where it has none."""
    norms = [
        (canonical_name(name), part)
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and isinstance(part.num_batches_tracked, Tensor)
    ]
    return RecomputedProbe(norms[:_MOST], first_step) if norms else None
