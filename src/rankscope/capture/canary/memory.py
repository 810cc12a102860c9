"""Whether a device has room for a canary, which needs what a step of the training needs, and more.

What a step takes beyond what lies there at its beginning (activations, gradients, workspaces) is
read from the allocator's own peak over several ordinary steps. The peak is the user's as well, so
it is never reset; steps in which someone else does are left out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.capture.canary.batch import CanaryDeclined

_ROOM = 1.5
"""Free memory that a run of a batch needs on an accelerator, in sizes of the gradient."""

_MARGIN = 1.1  # of what a step was seen to take
_LEFT = 2**30  # bytes that are left to whatever takes memory past torch

_ALLOCATED, _PEAK = "allocated_bytes.all.current", "allocated_bytes.all.peak"
_OUT_OF_MEMORY = ("out of memory", "can't allocate", "cannot allocate")


class _Seen(NamedTuple):
    allocated: int
    peak: int


class StepMemory:
    """What a step takes on an accelerator.

    Args:
        device: The device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stats = _stats_of(device)
        self._last: _Seen | None = None
        self._needed: int | None = None

    def see(self) -> None:
        """Look at the beginning of a step; once in each of the steps before a canary."""
        if self._stats is None:
            return
        found = self._stats(self._device)
        if _ALLOCATED not in found or _PEAK not in found:
            return
        now = _Seen(found[_ALLOCATED], found[_PEAK])
        if self._last is not None and now.peak >= self._last.peak and now.peak > now.allocated:
            self._needed = max(self._needed or 0, now.peak - self._last.allocated)
        self._last = now

    def forget(self) -> None:
        """Begin anew."""
        self._last = self._needed = None

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Check that there is room for another step beside what lies there now.

        Gradients may lie in memory of the wrapper's, so a step may not have shown them.

        Args:
            parameters: Those whose gradients a canary computes.

        Raises:
            CanaryDeclined: There is not, or it is not known.
        """
        if self._device.type == "cpu":
            return
        if self._needed is None:
            raise CanaryDeclined(
                "how much memory a step takes could not be measured, since the allocator does not "
                "say, or its peak is reset in every step"
            )
        needed = int(_MARGIN * self._needed) + sum(parameter.nbytes for parameter in parameters)
        free = _free(self._device, leave=_LEFT)
        if free is not None and free < needed:
            raise CanaryDeclined(
                f"a canary needs room for what a step takes ({needed / 2**30:.1f} GiB), and the "
                f"device has {free / 2**30:.1f} GiB"
            )


def check_gradient_room(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Check that an accelerator has room for a second gradient, and that no graph is captured.

    Raises:
        CanaryDeclined: It has none, or one is.
    """
    if device.type == "cpu":
        return
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise CanaryDeclined("a canary cannot run while the step is captured into a graph")
    needed = _ROOM * sum(parameter.nbytes for parameter in parameters)
    free = _free(device)
    if free is not None and free < needed:
        raise CanaryDeclined(
            f"a canary needs room for a second gradient ({needed / 2**30:.1f} GiB), and the "
            f"device has {free / 2**30:.1f} GiB"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that no memory was left."""
    kind = getattr(torch, "OutOfMemoryError", MemoryError)
    if isinstance(error, kind | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def _free(device: torch.device, *, leave: int = 0) -> int | None:
    """Return how many bytes a tensor could still get; None where the device does not say.

    Args:
        device: The device.
        leave: Bytes that are not to be taken from what the device has left.
    """
    on_device: Any = torch.get_device_module(device)
    ask = getattr(on_device, "mem_get_info", None)
    if ask is None:
        return None
    unused: int = on_device.memory_reserved(device) - on_device.memory_allocated(device)
    return unused + max(int(ask(device)[0]) - leave, 0)


def _stats_of(device: torch.device) -> Any:
    """Return what tells of the allocator, if there is one that counts."""
    if device.type == "cpu":
        return None
    return getattr(torch.get_device_module(device), "memory_stats", None)
