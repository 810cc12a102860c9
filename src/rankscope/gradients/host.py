"""Copies from an accelerator to the host that do not stall the training thread."""

import math
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.errors import UnsupportedError


class HostCopy:
    """A tensor on its way to the host; started at once, waited for when it is read.

    :meth:`numpy` returns its present content, whatever happens to the tensor later on its own
    stream. On the host it is copied, unless it is the caller's ``own``: nobody else holds its
    memory. A DTensor is an UnsupportedError: copying one would communicate.
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


@dataclass(slots=True, eq=False)
class OnHost:
    """Numbers that are on the host already, to stand where a :class:`HostCopy` may."""

    array: NDArray[np.generic]
    ready: bool = True

    def numpy(self) -> NDArray[np.generic]:
        """Return them."""
        return self.array


class Share:
    """A part of the memory that the measurements of a step fill on a device, to be copied at once.

    It stands where a :class:`HostCopy` may. The copy begins when a part of it is read, or with all
    others: see :func:`begin_copies`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: _Shared | None = None
        self._first = self._words = 0

    def take(self, words: int) -> Tensor:
        """Return int64 ``[words]``, to be filled by launches on the current stream now."""
        device = self._device
        with _lock:
            shared = _open.get(device)
            if shared is not None and not shared.is_open:
                shared = None
            room = _rooms.get(device, _ROOM)
            needed = words if shared is None else shared.used + words
            if needed > room:
                _rooms[device] = 2 * needed
            if shared is None or needed > shared.words:
                if shared is not None:
                    shared.begin()
                shared = _open[device] = _Shared(device, max(room, 2 * words))
            self._first = shared.used
            self._words = words
            self._shared = shared
            return shared.take(words)

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self._shared is None or self._shared.begin().ready

    def numpy(self) -> NDArray[np.generic]:
        """Wait for the copy and return this part of it, int64."""
        if self._shared is None:
            return np.empty(0, np.int64)
        return self._shared.begin().numpy()[self._first : self._first + self._words]


class FewNumbers(Share):
    """A few real numbers, copied with all else that a step measures, as float64 or int64."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        super().__init__(tensor.device)
        self._shape = tuple(tensor.shape)
        self._kind = np.float64 if dtype is torch.float64 else np.int64
        self.take(tensor.numel()).view(dtype).view(self._shape).copy_(tensor.detach())

    def numpy(self) -> NDArray[np.generic]:
        """Wait for the copy and return the numbers."""
        return super().numpy().view(self._kind).reshape(self._shape)


def copy_numbers(
    tensor: Tensor, dtype: torch.dtype, *, own: bool = False
) -> "HostCopy | FewNumbers":
    """Begin to copy a few real numbers to the host, where they arrive as float64 or int64.

    ``own`` is as in :class:`HostCopy`.
    """
    if tensor.is_cuda and type(tensor) is Tensor and tensor.layout is torch.strided:
        return FewNumbers(tensor, dtype)
    converted = tensor if tensor.dtype is dtype else tensor.to(dtype)
    return HostCopy(converted, own=own or converted is not tensor)


class _Shared:
    """So many words of 64 bits on a device, and their copy."""

    def __init__(self, device: torch.device, words: int) -> None:
        self._memory: Tensor | None = torch.empty(words, dtype=torch.int64, device=device)
        self._stream = _stream_of(device)
        self._copy: HostCopy | None = None
        self.words = words
        self.used = 0

    @property
    def is_open(self) -> bool:
        """Whether more can be taken, and filled on the stream that is current now."""
        return self._memory is not None and self._stream == _stream_of(self._memory.device)

    def take(self, words: int) -> Tensor:
        """Return the next so many."""
        assert self._memory is not None
        part = self._memory[self.used : self.used + words]
        self.used = -(-(self.used + words) // _ALIGNED) * _ALIGNED
        return part

    def begin(self) -> HostCopy:
        """Begin to copy the used part, after the work that fills it; a second call does nothing."""
        with _lock:
            if self._memory is not None:
                stream = self._stream
                on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
                with on_stream:
                    self._copy = HostCopy(self._memory[: self.used], own=True)
                self._memory = None
            assert self._copy is not None
            return self._copy


def begin_copies() -> None:
    """Begin to copy all memory that the measurements of a step fill."""
    with _lock:
        for shared in _open.values():
            shared.begin()
        _open.clear()


def _stream_of(device: torch.device) -> Any:
    """Return the current stream of a device; None where the host does the work."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


_ROOM = 1 << 13  # words, to begin with
_ALIGNED = 16  # words: Triton compiles a kernel anew for addresses that are aligned otherwise

_lock = threading.RLock()
_open: dict[torch.device, _Shared] = {}
_rooms: dict[torch.device, int] = {}

Numbers = HostCopy | FewNumbers | OnHost


def number_of(value: object) -> float:
    """Return a number, or one in a tensor on the host; NaN for anything else."""
    if isinstance(value, Tensor):
        readable = value.device.type == "cpu" and value.numel() == 1  # elsewhere it would wait
        return float(value.detach()) if readable else math.nan
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except (OverflowError, TypeError, ValueError):
        return math.nan
