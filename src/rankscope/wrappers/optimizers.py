"""A training's optimizers, several of them as one."""

from collections.abc import Sequence
from typing import Any

import torch


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
