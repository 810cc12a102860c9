"""What stands between the monitor and the training: nothing gets through, and it is timed."""

import time
from collections.abc import Callable
from typing import Any


class Guard:
    """Runs the monitor's work on the training thread: timed, and unable to raise into it.

    Args:
        failed: Called with the first exception; after it nothing runs any more.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.open = True
        self._failed = failed
        self._seconds = 0.0
        self._depth = 0
        self._cut_short = False

    def __call__(self, work: Callable[..., None], *args: Any) -> None:
        """Run ``work`` on what follows it, unless the guard is shut."""
        if not self.open:
            return
        start = time.perf_counter()
        self._depth += 1
        try:
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
                self._seconds += time.perf_counter() - start

    def leave_out(self, seconds: float) -> None:
        """Do not count part of the time, from inside of work: it is accounted for elsewhere."""
        self._seconds -= seconds

    def take_cut_short(self) -> bool:
        """Return whether Ctrl-C or the like has ended work halfway since the last call."""
        cut_short, self._cut_short = self._cut_short, False
        return cut_short

    def take_seconds(self) -> float:
        """Return the time that work has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
