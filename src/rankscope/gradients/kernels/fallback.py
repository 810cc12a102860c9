"""What is logged and remembered where plain torch takes over from a faster kernel."""

import logging

_log = logging.getLogger("rankscope")


def log_fallback(what: str, error: Exception, level: int = logging.DEBUG) -> None:
    """Log that plain torch does something, since what is faster has failed; training goes on."""
    reason = str(error).strip().split("\n")[0]
    _log.log(level, "%s in plain torch: %s", what, reason)


class Launching:
    """Whether a kernel is not known to fail; else plain torch does its work for good.

    Args:
        what: What it does, in the words of :func:`log_fallback`.
    """

    def __init__(self, what: str) -> None:
        self.possible = True
        self._what = what

    def give_up(self, error: Exception) -> None:
        """Take notice that it has failed, whatever it is: training goes on, a little slower."""
        self.possible = False
        log_fallback(self._what, error, logging.INFO)
