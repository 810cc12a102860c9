"""A training's optimizers, several of them as one."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UsageError
from rankscope.wrappers.megatron import plain_megatron_optimizer


class JointOptimizer:
    """Several optimizers of one model as one; their settings are reported in this order."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.state = _JointState(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all, each once: an optimizer around another has the same."""
        groups = {id(group): group for each in self.optimizers for group in each.param_groups}
        return list(groups.values())


class _JointState(dict[Any, Any]):
    """The state of several optimizers by parameter: looked up there, and never copied."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__()
        self._optimizers = optimizers

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter in the optimizer that has it."""
        states = (each.state for each in self._optimizers)
        return next((state.get(key) for state in states if key in state), default)


def all_of(optimizer: Any) -> tuple[Any, ...]:
    """Return an optimizer, or all of a :class:`JointOptimizer`; nothing where there is none."""
    if isinstance(optimizer, JointOptimizer):
        return optimizer.optimizers
    return () if optimizer is None else (optimizer,)


_APART = 0.2  # distance of copies after an update, relative to their norm, at most
_LOOKED_AT = 64  # elements of a parameter

MARKS = ("_hp_mapping", "_z3_optimizer", "main_param")
"""Attributes of a parameter that DeepSpeed or Megatron-core trains in a tensor of its own."""


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of; 0 where it is no plain one."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0


def holds_any(optimizers: Iterable[Any], parameters: Sequence[Tensor]) -> bool:
    """Return whether an optimizer trains some parameters, themselves or by tensors of its own."""
    if any(getattr(p, mark, None) is not None for p in parameters for mark in MARKS):
        return True
    numbers = set(map(id, parameters))
    memories = set(map(memory_of, parameters)) - {0}
    return any(
        id(p) in numbers or memory_of(p) in memories
        for each in optimizers
        for group in getattr(each, "param_groups", ())
        for p in group["params"]
    )


def copies_of(
    parameters: Iterable[Tensor], tensors: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter and its copy among tensors; none unless these are all copies.

    They have the shapes of those that require a gradient, and the values of their first elements,
    a small update later.
    """
    own = [p for p in parameters if p.requires_grad]
    if not tensors or len(own) != len(tensors):
        return []
    ordered = (sorted(some, key=lambda tensor: tuple(tensor.shape)) for some in (own, tensors))
    pairs = list(zip(*ordered, strict=True))
    if any(p.shape != copy.shape or p.device != copy.device for p, copy in pairs):
        return []
    own_K = torch.cat([first_of(each) for each, _ in pairs])
    copied_K = torch.cat([first_of(copy) for _, copy in pairs])
    near = float((own_K - copied_K).norm()) < _APART * float(copied_K.norm())
    return pairs if near else []


def first_of(tensor: Tensor) -> Tensor:
    """Return the first elements of a tensor."""
    return tensor.detach().reshape(-1)[:_LOOKED_AT].to("cpu", torch.float64)


def trained_copies(
    optimizers: Iterable[Any], parameters: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter and the copy in another type that an optimizer trains for it."""
    of_plain = [p for p in parameters if memory_of(p)]
    for each in optimizers:
        groups = getattr(each, "param_groups", ())
        pairs = copies_of(of_plain, [p for group in groups for p in group["params"]])
        if pairs and all(p.dtype != copy.dtype for p, copy in pairs):
            return pairs
    return []


def may_train(optimizers: Sequence[Any], parameters: Sequence[Tensor]) -> bool:
    """Return whether optimizers may train a model: they hold parameters of it, or tensors for it.

    The latter are flat, of another type, on another device, or copies by their values.
    """
    tensors = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    if not tensors or not parameters or holds_any(optimizers, parameters):
        return True
    if not all(map(memory_of, [*tensors, *parameters])) or all(p.dim() < 2 for p in tensors):
        return True
    kinds = {(p.dtype, p.device) for p in parameters}
    others = any((p.dtype, p.device) not in kinds for p in tensors)
    return others or bool(copies_of(parameters, tensors))


def held_names(optimizer: Any, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that an optimizer, or several as one, holds."""
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return [name for name, parameter in parameters.items() if id(parameter) in held]


def held_bits(optimizer: Any, parameters: Mapping[str, Tensor]) -> str:
    """Return a bit for each parameter that an optimizer holds, as ``0x…``; empty if it holds all.

    The highest bit is always set: it marks how many parameters there are. Empty, too, where it
    holds other tensors, which may be copies of any parameter.
    """
    held = set(held_names(optimizer, parameters))
    known = {id(parameter) for parameter in parameters.values()}
    others = any(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if others or len(held) in (0, len(parameters)):
        return ""
    return hex(int("1" + "".join("01"[name in held] for name in parameters), 2))


def are_shares(held_W: Sequence[int]) -> bool:
    """Return whether each parameter is in the optimizer of one worker, given :func:`held_bits`.

    Example:
        >>> are_shares([0b101, 0b110]), are_shares([0b111, 0b110]), are_shares([0b101, 0b101])
        (True, False, False)
    """
    count = held_W[0].bit_length() - 1
    shares_W = [held ^ (1 << count) for held in held_W]
    disjoint = sum(share.bit_count() for share in shares_W) == count
    return disjoint and functools.reduce(or_, shares_W) == (1 << count) - 1


def check_optimizers(optimizer: Any) -> None:
    """Raise a UsageError for a name, a class or a scheduler in the place of an optimizer."""
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for each in given:
        if each is not None and (isinstance(each, type) or not hasattr(each, "param_groups")):
            name = each.__name__ if isinstance(each, type) else type(each).__name__
            raise UsageError(
                "watch() expected an optimizer with param_groups, or several in a list, got "
                f"{'the class ' * isinstance(each, type)}{name}: watch(model, optimizer, …)"
            )


def plain_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that do the steps, inside one or several that the training calls."""
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    plain = [plain_optimizer(each) for each in given]
    return [each for each in plain if each is not None]


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that does the steps, out of wrappers that only pass calls on.

    Accelerate's wrapper is an ``Optimizer`` that was never made one: it takes no hooks, and
    Megatron-core's is none. None when it wraps something else, such as DeepSpeed's.
    """
    optimizer = plain_megatron_optimizer(optimizer)
    while isinstance(optimizer, torch.optim.Optimizer):
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether ``optimizer.step`` runs the backward pass itself, before it updates."""
    given = (*args[1:], *kwargs.values())
    return bool(given) and any(map(callable, given))
