"""How long a worker is busy in a step before it begins to wait for the others.

Wall time per step is the same on all workers, since all wait for the slowest. What tells them
apart is the time from the end of one reduction to the last local gradient before the next one.
"""

import math
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel

_METHOD = "_sync_buffers"
_original: Callable[[DistributedDataParallel], None] | None = getattr(
    DistributedDataParallel, _METHOD, None
)
_clocks: "WeakKeyDictionary[DistributedDataParallel, list[BusyClock]]" = WeakKeyDictionary()


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
        self._on_host = device.type == "cpu" and _original is not None
        self._free_at: float | None = None  # when the last reduction had ended
        self._ready_at = math.nan
        self._broadcasting = 0.0
        self._seconds: float | None = None
        _clocks.setdefault(model, []).append(self)
        if _original is not None:
            timed = torch.compiler.disable(_sync_and_time)  # type: ignore[no-untyped-call]
            setattr(DistributedDataParallel, _METHOD, timed)

    @property
    def seconds(self) -> float:
        """How long this worker was busy in the step that has just been reduced; NaN if unknown."""
        return math.nan if self._seconds is None else self._seconds

    def see_gradient(self) -> None:
        """Take note that a local gradient is ready; the last call before the reduction counts."""
        self._ready_at = time.perf_counter()

    def see_broadcast(self, seconds: float) -> None:
        """Leave out a broadcast of buffers."""
        self._broadcasting += seconds

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
        model = self._model()
        clocks = [] if model is None else _clocks.get(model, [])
        if self in clocks:
            clocks.remove(self)
        if not clocks and model is not None:
            _clocks.pop(model, None)
        if not _clocks and _original is not None:
            setattr(DistributedDataParallel, _METHOD, _original)

    def _waits_elsewhere(self) -> bool:
        """Return whether DDP may have waited for other workers inside the backward pass.

        A communication hook may wait for one bucket before it starts the next, as that of the
        exact tier does. From a ``join()`` on, the first gradient waits until all workers have
        begun their forward pass.
        """
        model = self._model()
        return model is None or bool(model._comm_hooks) or bool(model._join_config.enable)


def _sync_and_time(model: DistributedDataParallel) -> None:
    assert _original is not None
    start = time.perf_counter()
    _original(model)
    seconds = time.perf_counter() - start
    for clock in tuple(_clocks.get(model, ())):
        clock.see_broadcast(seconds)
