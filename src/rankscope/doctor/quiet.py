"""Keeps what the workers' code prints apart from the command's own output."""

import os
import sys
import threading


class QuietOutput:
    """Sends what is printed elsewhere, also by libraries in C, until :meth:`restore`.

    Rank 0's standard output goes to its standard error, so that what the command prints is alone;
    the other ranks print nothing.

    Args:
        rank: This worker's rank.
    """

    def __init__(self, rank: int) -> None:
        self._lock = threading.Lock()
        self._saved: dict[int, int] = {}
        self._stdout = sys.stdout
        _flush()
        if rank == 0:
            sys.stdout = sys.stderr
            self._saved[1] = os.dup(1)
            os.dup2(2, 1)
        else:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in (1, 2):
                self._saved[number] = os.dup(number)
                os.dup2(nowhere, number)
            os.close(nowhere)

    def restore(self) -> None:
        """Print as before; further calls do nothing."""
        with self._lock:
            saved, self._saved = self._saved, {}
        if saved:
            _flush()
            sys.stdout = self._stdout
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
