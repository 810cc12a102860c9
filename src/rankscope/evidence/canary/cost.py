"""The cost of a canary, and whether it may run: time, memory of its device, DDP's broadcasts.

Time is measured on the host and on the device, without waiting for the device. A canary needs more
memory than a step of the training. The memory that a step adds (activations, gradients,
workspaces) is read from the allocator's peak over several ordinary steps. The peak is also the
user's, so it is never reset; steps in which the user resets it are left out.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.gradients.digest import digest_tensor

_ROOM = 1.5
"""Free memory that a run of a batch needs on an accelerator, in sizes of the gradient."""

_MARGIN = 1.1  # over the measured memory of a step
_LEFT = 2**30  # bytes for allocations outside of torch

_ALLOCATED = "allocated_bytes.all.current"
_PEAK = "allocated_bytes.all.peak"
_OUT_OF_MEMORY = ("out of memory", "can't allocate", "cannot allocate")


class Stopwatch:
    """Measures the time of a piece of work, on the training thread and on the device.

    ``before`` are seconds that belong to it and have passed already.
    """

    def __init__(self, device: torch.device, before: float = 0.0) -> None:
        self._before = before
        self._first = _mark(device)
        self._device = device
        self._last: torch.Event | None = None
        self._start = time.perf_counter()
        self.host_seconds = 0.0  # on the training thread

    def stop(self) -> None:
        """End the piece of work."""
        self.host_seconds = time.perf_counter() - self._start
        self._last = None if self._first is None else _mark(self._device)

    @property
    def ready(self) -> bool:
        """Whether :attr:`seconds` is known."""
        return self._last is None or bool(self._last.query())

    @property
    def seconds(self) -> float:
        """Seconds on the host or on the device, whichever took longer; does not wait."""
        device = 0.0
        if self._first is not None and self._last is not None and self._last.query():
            device = self._first.elapsed_time(self._last) / 1000
        return self._before + max(self.host_seconds, device)


def _mark(device: torch.device) -> torch.Event | None:
    """Return a timed event in the device's queue; None where there is none."""
    if device.type == "cpu":
        return None
    try:
        event = torch.Event(device=device, enable_timing=True)
        event.record()
    except (RuntimeError, TypeError):
        return None
    return event


class _Memory(NamedTuple):
    allocated: int
    peak: int


class StepMemory:
    """The memory that a step takes on an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stats = getattr(on_device, "memory_stats", None)
        self._last: _Memory | None = None
        self._needed: int | None = None

    def see(self) -> None:
        """Read the allocator at the beginning of a step, in each of the steps before a canary."""
        if self._stats is None:
            return
        found = self._stats(self._device)
        if _ALLOCATED not in found or _PEAK not in found:
            return
        now = _Memory(found[_ALLOCATED], found[_PEAK])
        if self._last is not None and now.peak >= self._last.peak and now.peak > now.allocated:
            self._needed = max(self._needed or 0, now.peak - self._last.allocated)
        self._last = now

    def forget(self) -> None:
        """Begin anew."""
        self._last = self._needed = None

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Check that there is memory for another step now, with gradients of ``parameters``.

        These count in full: a step's own may lie in buffers of the wrapper.
        """
        if self._device.type == "cpu":
            return
        if self._needed is None:
            raise CanaryDeclined(
                "how much memory a step takes could not be measured, since the allocator does not "
                "say, or its peak is reset in every step"
            )
        needed = int(_MARGIN * self._needed) + sum(parameter.nbytes for parameter in parameters)
        check_room(needed, self._device, "what a step takes", leave=_LEFT)


def check_gradient_room(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Check that an accelerator has room for a second gradient, and that no graph is captured."""
    if device.type == "cpu":
        return
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise CanaryDeclined("a canary cannot run while the step is captured into a graph")
    check_room(_ROOM * sum(parameter.nbytes for parameter in parameters), device)


def check_room(
    needed: float, device: torch.device, what: str = "a second gradient", *, leave: int = 0
) -> None:
    """Check that an accelerator has room for so many bytes, and ``leave`` others."""
    free = None if device.type == "cpu" else _free(device, leave)
    if free is not None and free < needed:
        raise CanaryDeclined(
            f"a canary needs room for {what} ({needed / 2**30:.1f} GiB), and the "
            f"device has {free / 2**30:.1f} GiB"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that no memory was left."""
    kind = getattr(torch, "OutOfMemoryError", MemoryError)
    if isinstance(error, kind | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def _free(device: torch.device, leave: int) -> int | None:
    """Return the free bytes of a device, less ``leave``; None where they are unknown."""
    on_device: Any = torch.get_device_module(device)
    get_info = getattr(on_device, "mem_get_info", None)
    if get_info is None:
        return None
    unused: int = on_device.memory_reserved(device) - on_device.memory_allocated(device)
    return unused + max(int(get_info(device)[0]) - leave, 0)


class BroadcastBuffers:
    """Checks whether a model's next forward pass will run with its present buffers.

    Only DDP broadcasts buffers.
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
        """Check that they have not changed since they were noted."""
        noted = self._noted
        self._noted = None
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
        """Return digests of the buffers, int64 [number of buffers]; None if one is unreadable."""
        buffers = [b for b in self._module.buffers() if not getattr(b, "_ddp_ignored", False)]
        try:
            return torch.stack([digest_tensor(buffer).to(self._device) for buffer in buffers])
        except Exception:  # of a kind that cannot be read
            return None
