"""States of random generators, read without moving them, and digests of bytes.

Reading a state never draws from its generator. All of these states live on the host.
"""

import ctypes
import functools
import math
import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_MT_BYTES = 624 * 4 + 4  # key and position of a Mersenne twister
_LOOKED_AT = 64  # bytes of a state that show whether it has changed

Snapshot = bytes | tuple[bytes, object]
"""A generator's state; of Python's, its memory, and the number that was put aside."""


class _Twister:
    """Reads the state of a Mersenne twister from memory, as long as the same object holds it.

    A draw changes the position, and now and then every word of the key: a few words show it.
    """

    def __init__(self) -> None:
        self.owner: Any = None
        self._whole: Any = None
        self._part: Any = None
        self._seen = self._state = b""

    def look_at(self, owner: object, address: int, position: int) -> None:
        """Find the owner's state at an address from now on, and its position at a byte of it."""
        self._whole = (ctypes.c_char * _MT_BYTES).from_address(address)
        first = min(position, _MT_BYTES - _LOOKED_AT)
        self._part = (ctypes.c_char * _LOOKED_AT).from_address(address + first)
        self._seen = b""
        self.owner = owner

    def read(self) -> bytes:
        """Return the state; the very object of the last time, if it is the same."""
        seen = self._part.raw
        if seen != self._seen:
            self._seen = seen
            self._state = self._whole.raw
        return self._state


class _TorchState:
    """The state of torch's generator on the CPU: positions at both ends, words in between."""

    def __init__(self) -> None:
        self._seen = self._state = b""

    def read(self) -> bytes:
        """Return the state; the very object of the last time, if it is the same."""
        state = torch.default_generator.get_state()
        address = state.data_ptr()
        size = state.numel()
        ends = min(2 * _LOOKED_AT, size)
        seen = ctypes.string_at(address, ends) + ctypes.string_at(address + size - ends, ends)
        if seen != self._seen:
            self._seen = seen
            self._state = ctypes.string_at(address, size)
        return self._state


_python = _Twister()
_numpy = _Twister()
_torch = _TorchState()


def python_state() -> bytes:
    """Return the state of the generator behind Python's ``random`` functions."""
    return python_bytes(python_snapshot())


def python_snapshot() -> Snapshot:
    """Return the same in a form that is faster to read and compare, for :func:`python_bytes`."""
    generator = getattr(random.getstate, "__self__", None)
    if generator is not None and _python.owner is generator:
        return _python.read(), _python.owner.gauss_next
    if type(generator) is random.Random and _python_has_known_layout():
        _python.look_at(generator, id(generator) + object.__basicsize__, position=0)
        return _in_memory(generator)
    return python_state_bytes(random.getstate())


def python_bytes(snapshot: Snapshot) -> bytes:
    """Return the state that a snapshot is of."""
    if isinstance(snapshot, bytes):
        return snapshot
    position_and_key, gauss = snapshot
    words = np.frombuffer(position_and_key, np.uint32).astype("L")
    return words[1:].tobytes() + words[:1].tobytes() + repr(gauss).encode()


def num_drawn(before: Snapshot, after: Snapshot) -> float:
    """Return by how many words a twister has moved; infinite if they are not known.

    ``before`` and ``after``: states of Python's generator as snapshots, or of numpy's from memory.
    """
    places = []
    for state in (before, after):
        memory = state if isinstance(state, bytes) else state[0]
        words = np.frombuffer(memory, np.uint32) if len(memory) == _MT_BYTES else None
        if words is None:
            return math.inf
        python = not isinstance(state, bytes)
        places.append((int(words[0] if python else words[-1]), words[1:] if python else words[:-1]))
    (first, key), (last, new) = places
    moved = last - first
    return moved if np.array_equal(key, new) else moved + len(key)


def numpy_state() -> bytes:
    """Return the state of the global generator behind numpy's ``np.random`` functions.

    A normal number that ``np.random.normal`` has put aside for its next call is no part of it.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if _numpy.owner is generator:
        return _numpy.read()
    if type(generator) is np.random.MT19937 and _numpy_has_known_layout():
        position = _MT_BYTES - 4
        _numpy.look_at(generator, generator.ctypes.state_address, position)
        return _numpy.read()  # 0.5 µs instead of 30
    return flattened(generator.state)


def torch_state() -> bytes:
    """Return the state of torch's generator on the CPU."""
    return _torch.read()


def python_state_bytes(state: tuple[Any, ...]) -> bytes:
    """Return the result of ``getstate`` of one of Python's generators as bytes."""
    _, words, gauss = state
    return array("L", words).tobytes() + repr(gauss).encode()


def _in_memory(generator: random.Random) -> tuple[bytes, object]:
    """Return the object's memory behind its header, position and key, and one number."""
    held = ctypes.string_at(id(generator) + object.__basicsize__, _MT_BYTES)
    return held, generator.gauss_next  # type: ignore[attr-defined]


@functools.cache
def _python_has_known_layout() -> bool:
    """Return whether Python keeps a Mersenne twister in memory as CPython does."""
    twister = random.Random(0)  # its own: the global one is not touched
    twister.gauss(0, 1)
    room = random.Random.__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
    if sys.implementation.name != "cpython" or room < _MT_BYTES:
        return False
    return python_bytes(_in_memory(twister)) == python_state_bytes(twister.getstate())


@functools.cache
def _numpy_has_known_layout() -> bool:
    """Return whether numpy keeps a Mersenne twister in memory as it is expected to."""
    twister = np.random.MT19937(0)  # its own: the global one is not touched
    state = twister.state["state"]
    expected = state["key"].astype(np.uint32).tobytes() + np.int32(state["pos"]).tobytes()
    return ctypes.string_at(twister.ctypes.state_address, _MT_BYTES) == expected


def flattened(state: object) -> bytes:
    """Return the state of one of numpy's generators as bytes."""
    if isinstance(state, Mapping):
        return b"".join(str(key).encode() + flattened(state[key]) for key in sorted(state))
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()
