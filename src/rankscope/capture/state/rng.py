"""Fingerprints of the random generators that a worker uses.

Two workers whose generators stand at the same place draw the same dropout masks and the same
noise. That matters only where a generator moves: equal seeds without randomness are usual and
harmless. So a generator counts as used when a forward pass has moved it (dropout), and when it has
moved from one step's passes to the next one's (noise and augmentation outside the model).
"""

from collections.abc import Callable
from typing import Any

import torch

from rankscope.capture.state.fingerprint import (
    Snapshot,
    digest_of,
    numpy_state,
    python_bytes,
    python_snapshot,
    torch_state,
)

PYTHON, NUMPY, TORCH, ACCELERATOR = 1, 2, 4, 8
"""The generators, as bits of the column ``rng_used``."""

BETWEEN = 4
"""The same bits, shifted by so many, are generators that moved between two steps' passes."""

_DIGESTS = {
    "rng_digest": TORCH | ACCELERATOR,
    "rng_digest_python": PYTHON,
    "rng_digest_numpy": NUMPY,
}


class RandomMeter:
    """Tells which random generators a step moves, and where they started.

    It reads states and never draws: Python's ``random``, numpy's global generator, torch's on the
    CPU, and that of the device. A state of an accelerator's generator is a seed and an offset on
    the host; reading it does not wait for the device.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._readers: dict[int, Callable[[], Snapshot]] = {
            PYTHON: python_snapshot,
            NUMPY: numpy_state,
            TORCH: torch_state,
        }
        if device.type != "cpu":
            self._readers[ACCELERATOR] = _reader_of(device)
        self._first: dict[int, Snapshot] = {}
        self._last: dict[int, Snapshot] = {}  # where the passes of the step before left them
        self._after: dict[int, Snapshot] = {}  # of those that this step's passes have moved
        self._before: dict[int, Snapshot] | None = None
        self._used: int | None = None
        self._between = 0

    def before_forward(self) -> None:
        """Take the states before a forward pass; those before the first one of a step are kept.

        Only passes that are announced here are compared, so it is enough to announce the first.
        A generator that has moved in this step already is not read again.
        """
        used = self._used or 0
        states = {bit: read() for bit, read in self._readers.items() if not used & bit}
        if not self._first:
            self._first = states
            self._between = sum(bit for bit in self._last if self._last[bit] != states[bit])
            self._after = {}
        self._before = states

    def after_forward(self) -> None:
        """Take the end of a forward pass, announced or not: where it leaves what the step moves."""
        before, self._before = self._before or {}, None
        if not (before or self._used):
            return
        used = self._used or 0
        after = {bit: self._readers[bit]() for bit in (*before, *self._after)}
        moved = {bit for bit, state in before.items() if after[bit] != state}
        self._used = used | sum(moved)
        self._after = {bit: after[bit] for bit in (*moved, *self._after)}

    def collect(self) -> dict[str, int]:
        """Return which generators have moved and where they stood, and begin a new step.

        Returns:
            ``rng_used``, and digests of the states before the first forward pass of those that
            have moved: ``rng_digest`` of torch's, ``rng_digest_python`` and ``rng_digest_numpy``.
            Nothing when no forward pass was seen from beginning to end.
        """
        used, between, first = self._used, self._between, self._first
        self._used, self._between, self._first, self._before = None, 0, {}, None
        if used is None:
            self._last = {}
            return {}
        self._last = {**first, **self._after}
        values = {"rng_used": used | between << BETWEEN}
        for name, bits in _DIGESTS.items() if used | between else ():
            moved = bits & (used | between)
            states = [
                bytes([bit]) + python_bytes(state) for bit, state in first.items() if moved & bit
            ]
            if states:
                values[name] = digest_of(b"".join(states))
        return values


def _reader_of(device: torch.device) -> Callable[[], bytes]:
    module: Any = torch.get_device_module(device)

    def read() -> bytes:
        try:
            state = module.get_rng_state(device)
        except (RuntimeError, NotImplementedError, AttributeError):
            return b""  # cannot be told, as while a graph is being captured: then it never moves
        return state.numpy().tobytes() if state.device.type == "cpu" else b""

    return read
