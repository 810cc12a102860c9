"""Private random generators of the model's modules and of the data set.

One that was seeded with a local number, such as an index inside the rank, has the same state on all
ranks, which the global generators do not show.
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
"""Classes of random generators."""

_MOST = 8  # generators
_DEPTH = 3
_BREADTH = 16
_OBJECTS = 512
_HOLDERS = (list, tuple, dict)
_NOT_OPENED = (torch.Tensor, nn.Module, Sampler, DataLoader, type, str, bytes, np.ndarray)


class PrivateRandomMeter:
    """Digests the states of private generators that move from step to step.

    It reads states and never draws. It searches once, for at most eight generators, in attributes
    of modules, of the data set and of their attributes, short lists included. Samplers are left
    out, since theirs have to be alike; so are the processes of the data loader.

    Args:
        module: The model.
        loader: The training's data loader, or None.
    """

    def __init__(self, module: nn.Module, loader: Any = None) -> None:
        holders = [*module.modules(), getattr(loader, "dataset", None)]
        self._generators: list[Any] = []
        with contextlib.suppress(Exception):  # attributes may be objects of any kind
            self._generators += islice(_generators_in(holders), _MOST)
        self._last: list[bytes] = []
        self._digest: int | None = None

    def held(self) -> dict[str, int]:
        """Return a digest of the present state of each generator that has one, by name."""
        states = enumerate(map(_state_of, self._generators))
        return {f"generator {n} of the modules": digest_of(state) for n, state in states if state}

    def before_forward(self) -> None:
        """Read the generators before a step's first forward pass."""
        if not self._generators:
            return
        states = list(map(_state_of, self._generators))
        if self._last:
            moved = [s for s, last in zip(states, self._last, strict=True) if s != last]
            self._digest = digest_of(b"".join(moved)) if moved else None
        self._last = states

    def collect(self) -> dict[str, int]:
        """Return ``rng_private``, a digest of the states of those that have moved, if any has."""
        digest = self._digest
        self._digest = None
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
    """Return the attributes of an object, without running any property."""
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
        return b""  # unknown, as during the capture of a graph: it counts as unmoved
