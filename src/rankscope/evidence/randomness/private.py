"""Random generators that the model's modules and the data set hold for themselves.

A generator that was seeded with something local, an index inside the rank, say, stands at the same
place on all ranks, and none of the global ones shows it.
"""

import contextlib
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from rankscope.gradients.fingerprint import digest_of, flattened, python_state_bytes

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""What a random generator is."""

_MOST, _DEPTH, _BREADTH, _OBJECTS = 8, 3, 16, 512
_HOLDERS = (list, tuple, dict)
_NOT_OPENED = (torch.Tensor, nn.Module, Sampler, DataLoader, type, str, bytes, np.ndarray)


class PrivateRandomMeter:
    """Tells in which states private generators stand that move from step to step.

    It reads states and never draws. Generators are looked for once, in the attributes of modules,
    of the data set and of what these hold, short lists included: at most eight. Samplers are left
    out: theirs have to be alike. What processes of the data loader hold is not seen.

    Args:
        module: The model.
        loader: The training's data loader, or None.
    """

    def __init__(self, module: nn.Module, loader: Any = None) -> None:
        holders = [*module.modules(), getattr(loader, "dataset", None)]
        self._generators: list[Any] = []
        with contextlib.suppress(Exception):  # objects of any kind are looked at
            self._generators += islice(_generators_in(holders), _MOST)
        self._last: list[bytes] = []
        self._digest: int | None = None

    def before_forward(self) -> None:
        """Look at the generators before a step's first forward pass."""
        if not self._generators:
            return
        states = list(map(_state_of, self._generators))
        if self._last:
            moved = [s for s, last in zip(states, self._last, strict=True) if s != last]
            self._digest = digest_of(b"".join(moved)) if moved else None
        self._last = states

    def collect(self) -> dict[str, int]:
        """Return ``rng_private``, a digest of the states of those that have moved, if any has."""
        digest, self._digest = self._digest, None
        return {} if digest is None else {"rng_private": digest}


def _generators_in(holders: Iterable[Any]) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    level = [part for holder in holders for part in _attributes(holder)]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) >= _OBJECTS:
                continue
            seen[id(value)] = value  # alive, so that no other gets its id
            if issubclass(type(value), KINDS):
                if not isinstance(value, random.SystemRandom):  # it has no state
                    yield value
            elif issubclass(type(value), _HOLDERS):
                parts = value.values() if isinstance(value, dict) else value
                below += [part for part in islice(parts, _BREADTH) if _may_hold(part)]
            else:
                below += _attributes(value)
        level = below


def _attributes(value: Any) -> list[Any]:
    """Return what an object holds, without asking it: no property of its own runs."""
    own = getattr(value, "__dict__", None)
    return [part for part in list(own.values()) if _may_hold(part)] if type(own) is dict else []


def _may_hold(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (*KINDS, *_HOLDERS)):
        return True
    return kind.__dictoffset__ != 0 and not issubclass(kind, _NOT_OPENED)


def _state_of(generator: Any) -> bytes:
    try:
        if isinstance(generator, torch.Generator):
            return generator.get_state().numpy().tobytes()
        if isinstance(generator, random.Random):
            return python_state_bytes(generator.getstate())
        if isinstance(generator, np.random.Generator):
            return flattened(generator.bit_generator.state)
        return flattened(generator.get_state(legacy=False))
    except Exception:
        return b""  # cannot be told, as while a graph is being captured: then it never moves
