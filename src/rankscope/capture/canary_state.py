"""Everything that a forward pass may change, kept before a canary and put back after it.

Put back are the random generators of Python, numpy, torch and the accelerator; the bits of all
buffers and of all tensors that are attributes of a module; which objects the module's attributes,
buffers and parameters are; and the content of lists, dicts, sets and deques among its attributes.
What a forward pass changes elsewhere (a file, an object of its own) is out of reach.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BOOKKEEPING = ("_forward_", "_backward_", "_state_dict_", "_load_state_", "_non_persistent_")
_REGISTERS = ("_parameters", "_buffers", "_modules")


@contextmanager
def kept(module: nn.Module, device: torch.device, *, seed: int) -> Iterator[Callable[[int], None]]:
    """Run a block with seeded random generators, and put everything back after it.

    Args:
        module: The module whose forward pass is run inside.
        device: The device of its parameters.
        seed: Seed of all random generators inside; equal on all workers.

    Yields:
        What seeds them again.
    """
    generators = _Generators(device)
    modules = [_ModuleState(part) for part in module.modules()]
    try:
        generators.seed(seed)
        yield generators.seed
    finally:
        for state in modules:
            state.put_back()
        generators.put_back()


class _Generators:
    """The states of all global random generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the training's
        self._torch = torch.get_rng_state()
        self._accelerator = (
            None if self._on_device is None else self._on_device.get_rng_state(device)
        )

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if self._on_device is not None:
            with self._on_device.device(self._device):
                self._on_device.manual_seed(seed)

    def put_back(self) -> None:
        """Put back all states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._on_device is not None:
            self._on_device.set_rng_state(self._accelerator, self._device)


class _ModuleState:
    """The attributes, buffers and parameters of one module, without those of its children."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = {
            name: value
            for name, value in vars(module).items()
            if name not in _REGISTERS and not name.startswith(_BOOKKEEPING)
        }
        self._registers = {name: dict(vars(module)[name]) for name in _REGISTERS}
        self._containers = [
            (value, _copy(value)) for value in self._attributes.values() if _is_container(value)
        ]
        tensors = [*self._registers["_buffers"].values(), *self._attributes.values()]
        self._bits = [
            (tensor, tensor.detach().clone())
            for tensor in tensors
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
            if _is_writable(tensor)
        ]
        self._generators = [
            (value, value.get_state())
            for value in self._attributes.values()
            if isinstance(value, torch.Generator)
        ]

    def put_back(self) -> None:
        """Put back what has changed; a change of bits leaves no trace in a pending graph."""
        own = vars(self._module)
        for name, register in self._registers.items():
            _put_back_items(own[name], register)
        for name in [n for n in own if n not in self._attributes and _is_attribute(n)]:
            del own[name]
        for name, value in self._attributes.items():
            if name not in own or own[name] is not value:
                own[name] = value
        for container, content in self._containers:
            _fill(container, content)
        with torch.no_grad():
            for tensor, bits in self._bits:
                tensor.data.copy_(bits)  # .data: version counters stay as they are
        for generator, state in self._generators:
            generator.set_state(state)


def _is_attribute(name: str) -> bool:
    return name not in _REGISTERS and not name.startswith(_BOOKKEEPING)


def _put_back_items(register: dict[str, Any], before: dict[str, Any]) -> None:
    same = list(register) == list(before)
    if same and all(register[name] is value for name, value in before.items()):
        return
    register.clear()
    register.update(before)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether the forward pass can write into a tensor: no two elements share memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_inference():
        return False
    return not any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_container(value: object) -> bool:
    return isinstance(value, list | dict | set | deque)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


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
