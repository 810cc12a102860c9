"""Keeps monitor failures out of the training: a guard around work, and hooks that stay behind."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from rankscope.gradients.device_clock import DeviceClock, DeviceOverhead
from rankscope.private import find
from rankscope.wrappers.surroundings import outside


class Guard:
    """Runs the monitor's work on the training thread: timed, and unable to raise into it.

    It runs outside of the training's contexts (:mod:`rankscope.wrappers.surroundings`).

    Args:
        failed: Called with the first exception; after it nothing runs any more.
        clock: Times it on an accelerator, too; None where the host does the work.
    """

    def __init__(
        self, failed: Callable[[Exception], None], clock: DeviceClock | None = None
    ) -> None:
        self.open = True
        self._clock = clock
        self._failed = failed
        self._seconds = 0.0
        self._depth = 0
        self._cut_short = False

    def __call__(self, work: Callable[..., None], *args: Any) -> None:
        """Run ``work`` with the arguments, unless the guard is shut."""
        if not self.open:
            return
        start = time.perf_counter()
        if self._clock is not None and self._depth == 0:
            self._clock.begin()
        self._depth += 1
        try:
            if self._depth == 1:
                outside(work, *args)
            else:
                work(*args)
        except Exception as error:
            self.open = False
            self._failed(error)
        except BaseException:  # Ctrl-C: the training's, wherever Python happens to raise it
            self._cut_short = True
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                if self._clock is not None:
                    self._clock.end()
                self._seconds += time.perf_counter() - start

    def leave_out(self, seconds: float) -> None:
        """Do not count part of the time, from inside of work: it is accounted for elsewhere."""
        self._seconds -= seconds
        if seconds and self._clock is not None:
            self._clock.spoil()

    def take_cut_short(self) -> bool:
        """Return whether Ctrl-C or the like has ended work halfway since the last call."""
        cut_short, self._cut_short = self._cut_short, False
        return cut_short

    def take_seconds(self) -> float:
        """Return the time that work has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_device_overhead(
        self, step: int, on_host: float, *, observed: bool
    ) -> DeviceOverhead | None:
        """Return a step's overhead on an accelerator, see :meth:`DeviceClock.take`."""
        return None if self._clock is None else self._clock.take(step, on_host, observed=observed)


_callback: Callable[[], object] = find("torch._C._dynamo.eval_frame.get_eval_frame_callback") or (
    lambda: True
)
"""Returns the callback that traces all calls now; None if nothing traces."""


class ForeignHook:
    """A hook on the training's module that stays behind when the module is compiled or copied.

    ``torch.compile`` runs it as it is, without tracing it. A copy of the module, in memory or in a
    file, gets a hook that does nothing, and needs no monitor to be loaded.

    Args:
        hook: The function to call.
        compiled: Whether to call it in a compiled module as well. It breaks the module's graph
            there, which ``fullgraph=True`` does not allow.
    """

    def __init__(self, hook: Callable[..., None], *, compiled: bool = True) -> None:
        self._hook = hook
        self._untraced = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        self._compiled = compiled

    def __call__(self, *args: Any) -> None:
        """Call the hook; it returns nothing, so inputs and outputs stay as they are."""
        if torch.compiler.is_compiling():
            if self._compiled:
                self._untraced(*args)
        elif _callback() is None:
            self._hook(*args)
        else:
            self._untraced(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and stored as a method of the standard library that takes anything, returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")
