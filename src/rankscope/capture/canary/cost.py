"""How long a canary takes, on the host and on its device, without waiting for the device."""

import time

import torch


class Stopwatch:
    """Measures a piece of work on the training thread, and what it leaves to the device.

    Args:
        device: Where the work goes.
        before: Seconds that belong to it and have passed already.
    """

    def __init__(self, device: torch.device, before: float = 0.0) -> None:
        self._before = before
        self._first = _mark(device)
        self._device = device
        self._last: torch.Event | None = None
        self._start = time.perf_counter()
        self._host = 0.0

    def stop(self) -> None:
        """End the piece of work."""
        self._host = time.perf_counter() - self._start
        self._last = None if self._first is None else _mark(self._device)

    @property
    def host_seconds(self) -> float:
        """What the training thread spent until :meth:`stop`."""
        return self._host

    @property
    def ready(self) -> bool:
        """Whether :attr:`seconds` is known."""
        return self._last is None or bool(self._last.query())

    @property
    def seconds(self) -> float:
        """What it took, on the host or on the device, whichever took longer; waits for neither."""
        device = 0.0
        if self._first is not None and self._last is not None and self._last.query():
            device = self._first.elapsed_time(self._last) / 1000
        return self._before + max(self._host, device)


def _mark(device: torch.device) -> torch.Event | None:
    """Return an event that the device reaches in its turn; None where there is none with a time."""
    if device.type == "cpu":
        return None
    try:
        event = torch.Event(device=device, enable_timing=True)
        event.record()
    except (RuntimeError, TypeError):
        return None
    return event
