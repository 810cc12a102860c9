"""Copies from an accelerator to the host that do not stall the training thread."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.errors import UnsupportedError


class HostCopy:
    """A tensor on its way to the host; started at once, waited for when it is read.

    Args:
        tensor: Any tensor; its present content is what :meth:`numpy` returns, whatever happens
            to the tensor later on its own stream. No DTensor: copying one would communicate.
        own: Whether nobody else holds the tensor's memory: on the host it is then not copied.

    Raises:
        UnsupportedError: It is a DTensor.
    """

    def __init__(self, tensor: Tensor, *, own: bool = False) -> None:
        if isinstance(tensor, DTensor):
            raise UnsupportedError(
                f"expected a tensor of this rank's own, got a DTensor {tensor.placements}"
            )
        tensor = tensor.detach()
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor if own else tensor.clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.Event(device=tensor.device)
        self._event.record()

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def numpy(self) -> NDArray[np.generic]:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        array: NDArray[np.generic] = self._copy.numpy()
        return array


class OnHost:
    """Numbers that are on the host already, to stand where a :class:`HostCopy` may.

    Args:
        array: Nobody else changes it.
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array

    @property
    def ready(self) -> bool:
        """True."""
        return True

    def numpy(self) -> NDArray[np.generic]:
        """Return them."""
        return self._array


Numbers = HostCopy | OnHost
