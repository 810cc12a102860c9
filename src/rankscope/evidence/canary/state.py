"""Saves all state that a forward pass may change, before a canary, and puts it back after it.

This is the state of the random generators of Python, numpy, torch and the accelerator; and of every
module, its attributes, buffers and parameters: which objects they are, the bits of tensors, the
states of random generators, and the content of lists, dicts, sets and deques, at any depth. Changes
elsewhere (in a file, or an object of another class) remain.

Small buffers and attributes are copied at once; parameters and large tensors, when an operation is
about to write into them (a momentum teacher, a codebook, clamped weights), so that a frozen base
costs nothing. All get back their memory, where ``.data`` was replaced, and their version counters;
parameters also get back their ``.grad``, which is set aside meanwhile.
"""

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankscope.errors import RankscopeError
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.randomness.probe import KINDS

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
    before_write: Callable[[Tensor], None]  # takes what is about to be written
    before_draw: Callable[[torch.Generator], None]  # takes what may be drawn from
    nodes: frozenset[Any]  # of the training's graphs that lead to tensors of the modules


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
            if isinstance(own[name], dict):
                _put_back_items(own[name], register)
            else:  # that of a module in TorchScript, of which the names are fixed
                for key in [key for key, value in register.items() if own[name][key] is not value]:
                    own[name][key] = register[key]
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


AT_ONCE_BYTES = 2**20
"""Up to this size buffers and attributes are copied before the run, whether it writes or not."""


class SavedTensors:
    """The saved identity and content of parameters and other tensors."""

    def __init__(self, parameters: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        self._parameters = [_SavedTensor(p) for p in parameters if not is_lazy(p)]
        self._others = [_SavedTensor(t) for t in others if not is_lazy(t) and _is_writable(t)]
        self._unwritten: dict[int, list[_SavedTensor]] = {}
        self._copying = threading.RLock()  # a backward pass may write in several threads
        for saved in self._parameters:
            self._wait_for_write(saved)
        for saved in self._others:
            tensor = saved.tensor
            if _is_plain(tensor) and tensor.nbytes <= AT_ONCE_BYTES and saved.node is None:
                saved.save_bits()
            else:
                self._wait_for_write(saved)
        self._gradients = [(p, p.grad) for p in (k.tensor for k in self._parameters) if p.is_leaf]
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # raises now if this could not be done again

    def _wait_for_write(self, saved: "_SavedTensor") -> None:
        for storage in _storages(saved.tensor):
            self._unwritten.setdefault(storage, []).append(saved)

    def set_gradients_aside(self) -> None:
        """Leave every parameter without a gradient until all is put back."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def before_write(self, tensor: Tensor) -> None:
        """Copy the tensors that share memory with ``tensor``, which is about to be written."""
        for storage in _storages(tensor):
            with self._copying:
                for saved in self._unwritten.get(storage, ()):
                    saved.save_bits()
                self._unwritten.pop(storage, None)  # not if that raised: the model may try again

    @property
    def nodes(self) -> frozenset[Any]:
        """The graph nodes that made these tensors."""
        return frozenset(saved.node for saved in self._others if saved.node is not None)

    def restore_steps(self) -> Iterator[Callable[[], None]]:
        """Yield the functions that put back all changes, without effect on pending graphs."""
        for saved in (*self._parameters, *self._others):
            yield saved.put_back
        for parameter, gradient in self._gradients:  # which have their types again
            yield partial(setattr, parameter, "grad", gradient)


class _SavedTensor:
    """One tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.node: Any = tensor.grad_fn
        self._trained = tensor.requires_grad
        self._version = None if tensor.is_inference() else tensor._version
        self._before = tensor.data  # the same memory, and no version counter of the tensor's
        self._bits: Tensor | None = None

    def save_bits(self) -> None:
        """Copy its content."""
        if self.node is not None and self.tensor.grad_fn is self.node:
            raise CanaryDeclined(
                "a canary puts back what the forward pass changes, and this one writes into a "
                "tensor that is part of a graph of the training, which cannot be"
            )
        if not (_is_plain(self._before) and _is_writable(self._before)):
            raise CanaryDeclined(
                "a canary puts back what the forward pass changes, and this one writes into a "
                f"tensor of the kind {type(self.tensor).__name__}, {self.tensor.layout}, which "
                "cannot be"
            )
        self._bits = self._before.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put back its memory, its content, and its version counter."""
        if not _is_same(self.tensor.data, self._before):
            self.tensor.data = self._before
        if self._bits is not None:
            self._before.copy_(self._bits)
        if self.node is None and self.tensor.grad_fn is not None and not self.tensor._is_view():
            self.tensor.detach_()
        if self.tensor.is_leaf and self.tensor.requires_grad != self._trained:
            self.tensor.requires_grad_(self._trained)
        if self._version is not None and self.tensor._version != self._version:
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bits can be copied: it is neither sparse nor made of others."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether the forward pass can write into a tensor: no two elements share memory."""
    if tensor.is_meta or tensor.is_inference() or tensor.is_mkldnn:
        return False
    return tensor.layout is not torch.strided or not any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if _storages(one) != _storages(other) or one.layout is not torch.strided:
        return _storages(one) == _storages(other)
    return one.stride() == other.stride() and one.storage_offset() == other.storage_offset()


def _storages(tensor: Tensor) -> list[int]:
    """Return the memory of a tensor, of its parts, or of a sparse one's values."""
    outer: Any = tensor
    if is_traceable_wrapper_subclass(outer):
        names, _ = outer.__tensor_flatten__()
        inside = [part for name in names if isinstance(part := getattr(outer, name), Tensor)]
        return [storage for part in inside for storage in _storages(part)]
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return [tensor.untyped_storage()._cdata]
