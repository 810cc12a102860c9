"""What an optimizer holds and is set to, and the gradient scaler that calls it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.evidence.optimizer.probe import OptimizedParameter
from rankscope.private import callers
from rankscope.wrappers.optimizers import all_of

_SETTINGS = ("lr", "betas", "momentum", "weight_decay", "eps", "alpha", "dampening", "nesterov")
_SCALER = "torch.amp.grad_scaler"


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def like_parameter(parameter: Tensor, value: Any) -> Any:
    """Return a state as its parameter is: distributed, where it has the shape of its shard."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def state_of(optimizer: Any, held: OptimizedParameter) -> Mapping[str, Any]:
    """Return the state as the optimizer has it: not the local parts alone."""
    for each in all_of(optimizer):
        state: Mapping[str, Any] = getattr(getattr(each, "optim", each), "state", {})
        if held.whole in state:
            return state[held.whole]  # type: ignore[index, no-any-return]
    return {}


def scaler_around() -> dict[str, float]:
    """Return the state of the gradient scaler that calls an optimizer; empty without one."""
    for frame in callers():
        own = frame.f_locals.get("self") if frame.f_globals.get("__name__") == _SCALER else None
        if isinstance(own, torch.amp.GradScaler):
            return own.state_dict()
    return {}


def settings_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are compared."""
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = value
        elif isinstance(value, list | tuple):
            found[name] = [float(one) for one in value]
    return found
