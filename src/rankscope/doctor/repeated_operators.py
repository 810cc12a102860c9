"""Runs every operator of a computation twice on the same inputs, and tells which differ.

A comparison of two whole runs only shows the first operator that differs: all that follow differ as
well. Here each operator repeats on its own, below autograd, in forward and backward alike.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_UNINITIALISED = ("empty", "new_empty", "resize")
"""Beginnings of the names of operators whose result has no value yet."""
_NO_REPEAT = ("c10d", "_c10d_functional", "c10d_functional", "profiler", "inductor", "prims")
_BACKWARD = "in the backward pass"
_FORWARD = "in the forward pass"


class RepeatedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Repeats operators while it is active; what the computation gets are the first results.

    Args:
        device: Where the computation runs.

    Attributes:
        num_repeated: Calls that were repeated.
        differing: How many calls of each operator differed, by name and pass:
            ``aten::index_add in the backward pass``.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.num_repeated = 0
        self.differing: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and run it again where that tells something."""
        kwargs = kwargs or {}
        if not _repeatable(func):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            inputs, others = tree_map(_copied, (args, kwargs))
            again = self._after_same_state(func, inputs, others)
            result = func(*args, **kwargs)
            before = _tensors((args, kwargs, result))
            after = _tensors((inputs, others, again()))
        else:
            again = self._after_same_state(func, args, kwargs)
            result = func(*args, **kwargs)
            before, after = _tensors(result), _tensors(again())
        self.num_repeated += 1
        if not all(map(same_bits, before, after)):
            where = _BACKWARD if torch._C._current_graph_task_id() != -1 else _FORWARD
            self.differing[f"{func._schema.name} {where}"] += 1
        return result

    def _after_same_state(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Return what runs an operator again from the random state of this moment."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random:
            return lambda: func(*args, **kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        generators = [value for value in leaves if isinstance(value, torch.Generator)]
        before = self._states(generators)

        def again() -> Any:
            after = self._states(generators)
            self._put_back(generators, before)
            try:
                return func(*args, **kwargs)
            finally:
                self._put_back(generators, after)

        return again

    def _states(self, generators: Sequence[torch.Generator]) -> list[Tensor]:
        """Return the states of given generators, and of torch's own."""
        states = [*(g.get_state() for g in generators), torch.get_rng_state()]
        if self._on_device is not None:
            states.append(self._on_device.get_rng_state(self._device))
        return states

    def _put_back(self, generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        torch.set_rng_state(states[len(generators)])
        if self._on_device is not None:
            self._on_device.set_rng_state(states[-1], self._device)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same bits; those that have no plain bits count as equal.

    Waits for the device.
    """
    if first is second or first.layout is not torch.strided or first.is_meta:
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_quantized or not first.numel():
        return True
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if plain.dtype is torch.bool else plain.reshape(-1).view(torch.uint8)


def _repeatable(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace in _NO_REPEAT:
        return False
    name = schema.name.partition("::")[2].lstrip("_")
    return not (name.startswith(_UNINITIALISED) or getattr(func, "is_view", False))


def _copied(value: Any) -> Any:
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return value.detach().clone() if plain else value


def _tensors(values: Any) -> list[Tensor]:
    def found() -> Iterator[Tensor]:
        for value in tree_flatten(values)[0]:
            if isinstance(value, Tensor):
                yield value

    return list(found())
