"""When a backward pass has really ended, and when the reduction that it started has."""

from collections.abc import Callable

import torch
from torch.autograd import Variable

from rankscope.capture.tap import Guarded


class BackwardEnd:
    """Notices the end of backward passes, from inside hooks that run in them.

    A callback that is queued in a running backward pass runs at its end, and not at all when the
    pass raises. One that is queued by such a callback runs after all others: after DDP and FSDP2
    have finished the reduction, before the training gets the gradient to clip it.

    Reentrant activation checkpointing runs passes of its own inside the outer one. From inside
    such a pass the outer one cannot be seen, so the end of an inner pass looks like the end of
    all; ``nested`` tells that several passes were noticed since :meth:`begin`.

    Args:
        ended: Called at the end of a backward pass, after its reduction.
        guarded: Keeps exceptions out of the backward pass.
    """

    def __init__(self, ended: Callable[[], None], guarded: Guarded) -> None:
        self._ended = ended
        self._guarded = guarded
        self._noticed: set[int] = set()
        self._running: set[int] = set()

    @property
    def running(self) -> bool:
        """Whether a backward pass that was noticed has not ended: it runs, or it raised."""
        return bool(self._running)

    @property
    def nested(self) -> bool:
        """Whether more than one pass was noticed since :meth:`begin`."""
        return len(self._noticed) > 1

    def begin(self) -> None:
        """Say that the next pass is a new one; passes that raised are forgotten."""
        self._running.clear()
        self._noticed.clear()

    def notice(self) -> None:
        """Say, from inside a hook, that a backward pass runs."""
        task = torch._C._current_graph_task_id()
        if task not in self._noticed:
            self._noticed.add(task)
            self._running.add(task)
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(lambda: self._end(task)))

    def _end(self, task: int) -> None:
        if task in self._running:
            self._running.remove(task)
            if not self._running:
                self._guarded(self._ended)
