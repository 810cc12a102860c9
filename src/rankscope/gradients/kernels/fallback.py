"""Logs and remembers that plain torch takes over from a faster kernel."""

import logging

_log = logging.getLogger("rankscope")


def log_fallback(what: str, error: Exception, level: int = logging.DEBUG) -> None:
    """Log that plain torch does the work, since a faster way has failed; training goes on."""
    reason = str(error).strip().split("\n")[0]
    _log.log(level, "%s in plain torch: %s", what, reason)


class Launching:
    """Whether a kernel is still used; after a failure plain torch does its work for good.

    Args:
        what: Its work, in the words of :func:`log_fallback`.
    """

    def __init__(self, what: str) -> None:
        self.possible = True
        self._what = what

    def give_up(self, error: Exception) -> None:
        """Note that it has failed: training goes on, a little slower."""
        self.possible = False
        log_fallback(self._what, error, logging.INFO)
