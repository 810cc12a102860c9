"""Saves all state that a forward pass may change, before a canary, and puts it back after it.

This is the state of the random generators of Python, numpy, torch and the accelerator; and of every
module, its attributes, buffers and parameters: which objects they are, the bits of tensors, the
states of random generators, and the content of lists, dicts, sets and deques, at any depth. Changes
elsewhere (in a file, or an object of another class) remain.
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
from rankscope.evidence.canary.tensors import SavedTensors
from rankscope.evidence.randomness.private import KINDS

_REGISTERS = ("_parameters", "_buffers", "_modules")
_HOOKS = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
).difference(_REGISTERS)
"""Attributes of torch's in every module, for hooks and the like."""

_CONTAINERS = (list, dict, set, deque)
_SEARCHED = (nn.Module, Tensor, tuple, *_CONTAINERS, *KINDS)


class NotPutBackError(RankscopeError):
    """Some state that a run has changed could not be put back."""


@dataclass(frozen=True, slots=True)
class PreservedState:
    """Functions for a run whose state is put back after it."""

    seed: Callable[[int], None]  # seeds all random generators
    # takes each tensor that an operation is about to write into
    before_write: Callable[[Tensor], None]
    # takes each generator that an operation may draw from
    before_draw: Callable[[torch.Generator], None]
    nodes: frozenset[Any]  # the nodes of the training's graphs that lead to tensors of the modules


@contextmanager
def preserved_state(
    module: nn.Module, device: torch.device, *, seed: int | None
) -> Iterator[PreservedState]:
    """Run a block with seeded random generators, and put everything back after it."""
    found = _ReachableState(module)
    generators = RandomGenerators(device, found.generators)
    tensors = SavedTensors(found.parameters, found.tensors)
    modules = [_ModuleState(part) for part in found.modules]
    containers = [(container, _copy(container)) for container in found.containers]
    restore_steps: list[Callable[[], None]] = [
        *(state.put_back for state in modules),
        *(partial(_put_back_content, container, content) for container, content in containers),
        *tensors.restore_steps(),
        generators.put_back,
    ]
    try:
        try:
            tensors.set_gradients_aside()
            if seed is not None:
                generators.seed(seed)
            yield PreservedState(
                generators.seed, tensors.before_write, generators.before_draw, tensors.nodes
            )
        finally:
            _restore_all(restore_steps)
    except Exception:
        raise
    except BaseException:  # Ctrl-C, perhaps in the middle of it: once more, from the beginning
        _restore_all(restore_steps)
        raise


def _restore_all(steps: Iterable[Callable[[], None]]) -> None:
    """Run all restore steps: one that fails does not stop the rest."""
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


class _ReachableState:
    """The state that a module reaches through modules, their attributes and containers."""

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
                waiting += [part for part in self._parts_of(value) if isinstance(part, _SEARCHED)]
        self.generators += _global_generators(self.modules)

    def _parts_of(self, value: Any) -> Iterable[Any]:
        """Note a value and return its parts."""
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
            if issubclass(type(value), KINDS):  # ``isinstance`` would run a proxy's code
                yield value


class _ModuleState:
    """The attributes, buffers, parameters and children of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = _attributes(module)
        self._registers = {name: dict(vars(module)[name]) for name in _REGISTERS}

    def put_back(self) -> None:
        """Put back those that have changed."""
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


def _put_back_content(container: Any, content: Any) -> None:
    """Put back a container's content, unless it is unchanged."""
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
    return RandomGenerators(device, _ReachableState(module).generators)


class RandomGenerators:
    """The states of all random generators that a forward pass may draw from.

    These are the global ones of Python, numpy, torch and the accelerator; those of a module, or of
    the file of its class, which a training may have seeded by rank; and others of torch's, once an
    operation uses them.
    """

    def __init__(self, device: torch.device, own: Iterable[Any] = ()) -> None:
        self._device = device  # the device of the model's parameters
        self._on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._seed: int | None = None
        self._own = {
            _place(generator): (_seeder(generator), _restorer(generator))
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
        """Save a generator that no module holds, and seed it like all others."""
        place = _place(generator)
        if place not in self._own:
            seed_one = _seeder(generator)
            self._own[place] = seed_one, _restorer(generator)
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
    """Return the identity of a generator, which operations get as different Python objects."""
    if isinstance(generator, torch.Generator):
        return int(generator._cdata)  # type: ignore[attr-defined]
    return id(generator)


def _seeder(generator: Any) -> Callable[[int], Any]:
    """Return a function that seeds a generator."""
    if isinstance(generator, torch.Generator):
        return generator.manual_seed
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed % 2**32)
    bits: Any = generator.bit_generator
    return lambda seed: setattr(bits, "state", type(bits)(seed).state)


def _restorer(generator: Any) -> Callable[[], Any]:
    """Return a function that puts a generator's present state back."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        before = bits.state
        return lambda: setattr(bits, "state", before)
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        words = generator.getstate()
        return lambda: generator.setstate(words)
    legacy = generator.get_state(legacy=False)
    return lambda: generator.set_state(legacy)
