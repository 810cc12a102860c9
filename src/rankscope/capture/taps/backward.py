"""When a backward pass begins, and when it and the reduction that it started have really ended."""

from collections.abc import Callable

from torch.autograd import Variable

from rankscope.capture.taps.tap import Guarded


class BackwardEnd:
    """Notices backward passes from inside hooks that run in them.

    A callback that is queued in a running backward pass runs at its end, and not at all when the
    pass raises. One that is queued by such a callback runs after all others: after DDP and FSDP2
    have finished the reduction, before the training gets the gradient to clip it.

    Reentrant activation checkpointing runs passes of its own inside the outer one. They count as
    part of it if the outer pass was noticed first: as soon as it reaches the model's output.

    Args:
        began: Called when a backward pass is noticed.
        ended: Called at its end, after its reduction.
        guarded: Keeps exceptions out of the backward pass.
        ending: Called when all gradients are there, before what finishes the reduction.
    """

    def __init__(
        self,
        began: Callable[[], None],
        ended: Callable[[], None],
        guarded: Guarded,
        ending: Callable[[], None] | None = None,
    ) -> None:
        self._began = began
        self._ended = ended
        self._ending = ending
        self._guarded = guarded
        self._running: object = None

    @property
    def running(self) -> bool:
        """Whether a backward pass that was noticed has not ended: it runs, or it raised."""
        return self._running is not None

    def begin(self) -> None:
        """Say that the next pass is a new one; one that raised is forgotten."""
        self._running = None

    def notice(self) -> None:
        """Say, from inside a hook, that a backward pass runs."""
        if self._running is not None:
            return
        this = self._running = object()
        Variable._execution_engine.queue_callback(lambda: self._near_end(this))
        self._began()

    def _near_end(self, this: object) -> None:
        if this is self._running and self._ending is not None:
            self._guarded(self._ending)
        Variable._execution_engine.queue_callback(lambda: self._end(this))

    def _end(self, this: object) -> None:
        if this is self._running:
            self._guarded(self._ended)
            self._running = None  # last: Ctrl-C in between leaves an aborted pass
