"""Random generators in a canary: seeded alike on every worker, and put back where they stood.

These are the global ones of Python, numpy, torch and the accelerator, and those that a module holds
for itself, which a training may well have seeded by rank.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""What a module may hold."""


class RandomGenerators:
    """The states of all random generators that a forward pass may draw from.

    Args:
        device: The device of the model's parameters.
        own: Generators that modules hold, of :data:`KINDS`.
    """

    def __init__(self, device: torch.device, own: Iterable[Any] = ()) -> None:
        self._device = device
        self._on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._own = [
            (_seeder(generator), _keeper(generator))
            for generator in own
            if not isinstance(generator, random.SystemRandom)  # it has no state
        ]
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the training's
        self._torch = torch.get_rng_state()
        self._accelerator = (
            None if self._on_device is None else self._on_device.get_rng_state(device)
        )

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        for seed_one, _ in self._own:
            seed_one(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if self._on_device is not None:
            with self._on_device.device(self._device):
                self._on_device.manual_seed(seed)

    def put_back(self) -> None:
        """Put back all states."""
        for _, put_back in self._own:
            put_back()
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._on_device is not None:
            self._on_device.set_rng_state(self._accelerator, self._device)


def _seeder(generator: Any) -> Callable[[int], Any]:
    """Return what seeds a generator."""
    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed % 2**32)
    bits: Any = generator.bit_generator
    return lambda seed: setattr(bits, "state", type(bits)(seed).state)


def _keeper(generator: Any) -> Callable[[], Any]:
    """Return what puts a generator back where it stands now."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        kept = bits.state
        return lambda: setattr(bits, "state", kept)
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        words = generator.getstate()
        return lambda: generator.setstate(words)
    legacy = generator.get_state(legacy=False)
    return lambda: generator.set_state(legacy)
