"""Buffers that DDP broadcasts before a forward pass, for canaries that must run before that."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture.canary.batch import CanaryDeclined
from rankscope.capture.state.digest import digest_tensor


class BroadcastBuffers:
    """Tells whether a model's buffers are those that its next forward pass will run with.

    Args:
        wrapper: What the training calls; only DDP broadcasts buffers.
        module: The model inside.
        device: The device of its parameters.
    """

    def __init__(self, wrapper: nn.Module, module: nn.Module, device: torch.device) -> None:
        self._ddp = wrapper if isinstance(wrapper, DistributedDataParallel) else None
        self._module = module
        self._device = device
        self._noted: tuple[Any, Tensor | None] | None = None

    def note(self, canary: object) -> None:
        """Note them in the step before a canary; the first call for a canary counts."""
        if self._noted is None or self._noted[0] != canary:
            self._noted = canary, self._digest()

    def check(self, canary: object) -> None:
        """Check that they have not changed since they were noted.

        Raises:
            CanaryDeclined: DDP is about to broadcast buffers that training changes.
        """
        noted, self._noted = self._noted, None
        if self._ddp is None or not self._ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return
        before = noted[1] if noted is not None and noted[0] == canary else None
        now = self._digest()
        if before is None or now is None or not torch.equal(before, now):
            raise CanaryDeclined(
                "the model is compiled, and changes buffers that DDP only makes alike after the "
                "place where its canary can run"
            )

    def _digest(self) -> Tensor | None:
        """Return digests of the buffers, int64 [number of buffers]; None if one has none."""
        buffers = [b for b in self._module.buffers() if not getattr(b, "_ddp_ignored", False)]
        try:
            return torch.stack([digest_tensor(buffer).to(self._device) for buffer in buffers])
        except Exception:  # of a kind that cannot be read
            return None
