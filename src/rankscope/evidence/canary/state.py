"""Everything that a forward pass may change, kept before a canary and put back after it.

Put back are the random generators of Python, numpy, torch and the accelerator; and of every module,
which objects its attributes, buffers and parameters are, the bits of those that are tensors, the
states of those that are random generators, and the content of lists, dicts, sets and deques among
them, at any depth. What a forward pass changes elsewhere (a file, an object of its own) is out of
reach.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import RankscopeError
from rankscope.evidence.canary.tensors import KeptTensors
from rankscope.evidence.randomness.private import KINDS

_REGISTERS = ("_parameters", "_buffers", "_modules")
_HOOKS = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
).difference(_REGISTERS)
"""What torch keeps in a module for hooks and the like."""

_CONTAINERS = (list, dict, set, deque)
_OPENED = (nn.Module, Tensor, tuple, *_CONTAINERS, *KINDS)


class NotPutBackError(RankscopeError):
    """Something that a run has changed could not be put back."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run that is to leave nothing behind needs.

    Attributes:
        seed: Seeds all random generators.
        before_write: Takes each tensor that an operation is about to write into.
        before_draw: Takes each generator that an operation may draw from, wherever it is held.
        nodes: The nodes of the training's graphs that lead to tensors of the modules.
    """

    seed: Callable[[int], None]
    before_write: Callable[[Tensor], None]
    before_draw: Callable[[torch.Generator], None]
    nodes: frozenset[Any]


@contextmanager
def kept(module: nn.Module, device: torch.device, *, seed: int | None) -> Iterator[Kept]:
    """Run a block with seeded random generators, and put everything back after it.

    Args:
        module: The module whose forward pass is run inside.
        device: The device of its parameters.
        seed: Seed of all random generators inside; equal on all workers. None: they go on from
            where they are.

    Yields:
        What seeds them again, what must be told of writes, and what must be left alone.

    Raises:
        NotPutBackError: Something could not be put back; all else was.
    """
    found = _Found(module)
    generators = RandomGenerators(device, found.generators)
    tensors = KeptTensors(found.parameters, found.tensors)
    modules = [_ModuleState(part) for part in found.modules]
    containers = [(container, _copy(container)) for container in found.containers]
    steps_back: list[Callable[[], None]] = [
        *(state.put_back for state in modules),
        *(partial(_fill, container, content) for container, content in containers),
        *tensors.steps_back(),
        generators.put_back,
    ]
    try:
        try:
            tensors.set_gradients_aside()
            if seed is not None:
                generators.seed(seed)
            yield Kept(generators.seed, tensors.before_write, generators.before_draw, tensors.nodes)
        finally:
            _take_all(steps_back)
    except Exception:
        raise
    except BaseException:  # Ctrl-C, perhaps in the middle of it: once more, from the beginning
        _take_all(steps_back)
        raise


def _take_all(steps: Iterable[Callable[[], None]]) -> None:
    """Take all steps back: one that fails does not hold up the rest.

    Raises:
        NotPutBackError: One has failed.
    """
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            failures.append(error)
    if failures:
        raise NotPutBackError(
            "a canary has left its traces in the model, since something that its forward pass "
            f"changed could not be put back: {failures[0]!r}"
        ) from failures[0]


class _Found:
    """What can be reached from a module through modules, their attributes and containers."""

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.containers: list[Any] = []
        self.parameters: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        seen: dict[int, Any] = {}
        waiting: list[Any] = [module]
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value  # alive, so that no other gets its id
                waiting += [part for part in self._open(value) if isinstance(part, _OPENED)]
        self.generators += _global_generators(self.modules)

    def _open(self, value: Any) -> Iterable[Any]:
        """Note a value and return what is in it."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
            held = [item for name in _REGISTERS for item in vars(value)[name].values()]
            return [*held, *_attributes(value).values()]
        if isinstance(value, Tensor):
            (self.parameters if isinstance(value, nn.Parameter) else self.tensors).append(value)
        elif isinstance(value, KINDS):
            self.generators.append(value)
        elif isinstance(value, tuple):
            return value
        else:
            self.containers.append(value)
            return list(value.values()) if isinstance(value, dict) else list(value)
        return ()


def _global_generators(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the generators that are global names of the files in which modules are defined."""
    for name in {type(module).__module__ for module in modules}:
        held = vars(sys.modules[name]) if name in sys.modules else {}
        for value in list(held.values()):
            if issubclass(type(value), KINDS):  # a proxy is not asked for its class
                yield value


class _ModuleState:
    """Which attributes, buffers, parameters and children one module has."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = _attributes(module)
        self._registers = {name: dict(vars(module)[name]) for name in _REGISTERS}

    def put_back(self) -> None:
        """Put back what has changed."""
        own = vars(self._module)
        for name, register in self._registers.items():
            _put_back_items(own[name], register)
        for name in [name for name in _attributes(self._module) if name not in self._attributes]:
            del own[name]
        for name, value in self._attributes.items():
            if name not in own or own[name] is not value:
                own[name] = value


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = vars(module).items()
    return {name: value for name, value in own if name not in _REGISTERS and name not in _HOOKS}


def _put_back_items(register: dict[str, Any], before: dict[str, Any]) -> None:
    if len(register) == len(before) and all(
        name is old_name and value is old
        for (name, value), (old_name, old) in zip(register.items(), before.items(), strict=True)
    ):
        return
    register.clear()
    register.update(before)


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _fill(container: Any, content: Any) -> None:
    """Give a container its content back, unless it holds that already."""
    if isinstance(container, dict):
        _put_back_items(container, content)
        return
    now = list(container)
    if len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True)):
        return
    container.clear()
    container.update(content) if isinstance(container, set) else container.extend(content)


def generators_of(module: nn.Module, device: torch.device) -> "RandomGenerators":
    """Return the present states of all random generators that a module's forward pass may use."""
    return RandomGenerators(device, _Found(module).generators)


class RandomGenerators:
    """The states of all random generators that a forward pass may draw from.

    The global ones of Python, numpy, torch and the accelerator; those that a module, or the file
    of its class, holds for itself, which a training may well have seeded by rank; and torch's
    others, as they are used.

    Args:
        device: The device of the model's parameters.
        own: Generators that modules hold, of :data:`KINDS`.
    """

    def __init__(self, device: torch.device, own: Iterable[Any] = ()) -> None:
        self._device = device
        self._on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._seed: int | None = None
        self._own = {
            _place(generator): (_seeder(generator), _keeper(generator))
            for generator in own
            if not isinstance(generator, random.SystemRandom)  # it has no state
        }
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the training's
        self._torch = torch.get_rng_state()
        self._accelerator = (
            None if self._on_device is None else self._on_device.get_rng_state(device)
        )

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        self._seed = seed
        for seed_one, _ in self._own.values():
            seed_one(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if self._on_device is not None:
            with self._on_device.device(self._device):
                self._on_device.manual_seed(seed)

    def before_draw(self, generator: torch.Generator) -> None:
        """Keep one that no module holds, and seed it like all others."""
        place = _place(generator)
        if place not in self._own:
            seed_one, _ = self._own[place] = _seeder(generator), _keeper(generator)
            if self._seed is not None:
                seed_one(self._seed)

    def put_back(self) -> None:
        """Put back all states; the global ones last, which may also be among the others."""
        for _, put_back in self._own.values():
            put_back()
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._on_device is not None:
            self._on_device.set_rng_state(self._accelerator, self._device)


def _place(generator: Any) -> int:
    """Return what tells generators apart: an operation is handed another object of the same one."""
    if isinstance(generator, torch.Generator):
        return int(generator._cdata)  # type: ignore[attr-defined]
    return id(generator)


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
