"""What calls of DDP's own methods tell: how long a worker is busy, and steps that it only shadows.

An attribute of the model would be copied along with it; so methods of its class are listened to.

How long a worker is busy in a step before it begins to wait for the others: wall time per step is
the same on all workers, since all wait for the slowest. What tells them apart is the time from the
end of one reduction to the last local gradient before the next one.
"""

import math
import time
from collections.abc import Callable
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture.taps.calls import Relay

_BROADCAST = Relay(DistributedDataParallel, "_sync_buffers", untraced=True)
_SHADOWED = Relay(DistributedDataParallel, "_match_all_reduce_for_bwd_pass")


class BusyClock:
    """Times what a worker does under DDP between two reductions.

    The host's clock tells it on the CPU alone: an accelerator works behind the host's back. Where
    DDP broadcasts buffers before a forward pass, the time of that broadcast is left out, since
    workers wait there for rank 0.

    Args:
        model: The wrapped model.
        device: Where its gradients are.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self._model = ref(model)
        self._on_host = device.type == "cpu" and _BROADCAST.exists
        self._free_at: float | None = None  # when the last reduction had ended
        self._ready_at = math.nan
        self._broadcast_at = 0.0
        self._broadcasting = 0.0
        self._seconds: float | None = None
        self._stop: Callable[[], object] = lambda: None
        if _BROADCAST.exists:
            begin, end = self._begin_broadcast, self._end_broadcast
            self._stop = _BROADCAST.tell(before=begin, after=end)

    @property
    def seconds(self) -> float:
        """How long this worker was busy in the step that has just been reduced; NaN if unknown."""
        return math.nan if self._seconds is None else self._seconds

    def see_gradient(self) -> None:
        """Take note that a local gradient is ready; the last call before the reduction counts."""
        self._ready_at = time.perf_counter()

    def see_reduced(self) -> None:
        """Take note that a reduction has ended: of every worker's gradient, at about one time."""
        free_at, self._free_at = self._free_at, time.perf_counter()
        again = self._seconds is not None  # a second reduction in one step is not comparable
        if free_at is None or again or not self._on_host or self._waits_elsewhere():
            self._seconds = math.nan
        else:
            self._seconds = self._ready_at - free_at - self._broadcasting
        self._broadcasting = 0.0

    def begin_step(self, *, reduced: bool) -> None:
        """Begin another step; without a reduction, its time since the last one is not known."""
        self._seconds = None
        if not reduced:
            self._free_at = None

    def remove(self) -> None:
        """Stop timing broadcasts; a second call does nothing."""
        self._stop()

    def _begin_broadcast(self, model: object) -> None:
        self._broadcast_at = time.perf_counter()

    def _end_broadcast(self, model: object) -> None:
        if model is self._model():
            self._broadcasting += time.perf_counter() - self._broadcast_at

    def _waits_elsewhere(self) -> bool:
        """Return whether DDP may have waited for other workers inside the backward pass.

        A communication hook may wait for one bucket before it starts the next, as that of the
        exact tier does. From a ``join()`` on, the first gradient waits until all workers have
        begun their forward pass.
        """
        model = self._model()
        return model is None or bool(model._comm_hooks) or bool(model._join_config.enable)


class ShadowSteps:
    """Notices the steps that a rank only shadows, since it has run out of data in ``model.join()``.

    Its hooks do not fire in them: DDP calls the reduction itself. The only place that all of these
    steps pass is a method of DDP's class.

    Args:
        model: The wrapped model.
        shadowed: Called after each of them.
    """

    def __init__(self, model: DistributedDataParallel, shadowed: Callable[[], None]) -> None:
        self._model = model
        self._shadowed = shadowed
        self._stop: Callable[[], object] = lambda: None
        if _SHADOWED.exists:
            self._stop = _SHADOWED.tell(after=self._see)

    def remove(self) -> None:
        """Stop listening; a second call does nothing."""
        self._stop()

    def _see(self, model: object) -> None:
        if model is self._model:
            self._shadowed()
