"""In which precision a training means its gradients to be reduced."""

from typing import Any

import torch
from torch import Tensor, nn

from rankscope.bus.groups import Groups
from rankscope.wrappers.deepspeed import is_deepspeed
from rankscope.wrappers.fsdp2_model import is_fsdp2, parameters_by_mesh
from rankscope.wrappers.megatron_model import is_megatron


def reduced_types(
    wrapper: nn.Module, parameters: dict[str, Tensor], groups: Groups
) -> dict[str, str]:
    """Return for each group the type in which its gradient is meant to be reduced.

    That is the coarsest of the type in which it is added up and the one in which the result is
    kept: under DDP the parameters', under FSDP2 also its ``MixedPrecisionPolicy``'s, of a DeepSpeed
    engine also its ``communication_data_type``; under Megatron-core it is the buffers'. A
    communication hook does not count: an audit is to find its effect on the gradient.

    Args:
        wrapper: The module that reduces gradients.
        parameters: The parameters that require a gradient, by canonical name.
        groups: Which of them belongs to which group.

    Returns:
        By the group's name, the name of its type: ``float32``, ``bfloat16``, ``float16`` or
        ``float64``.
    """
    if is_deepspeed(wrapper):
        sums = dict.fromkeys(parameters, _of_engine(wrapper))
    elif is_fsdp2(wrapper):
        sums = {p.name: p.summed_in for each in parameters_by_mesh(wrapper) for p in each}
    else:
        sums = {}
    buffered = is_megatron(wrapper)
    coarsest: dict[str, torch.dtype] = {}
    for name, parameter in parameters.items():
        group = groups.names[groups.index_of[name]]
        held = getattr(parameter, "main_grad", parameter) if buffered else parameter
        own = _real(held.dtype)
        for dtype in (own, _real(sums.get(name, own))):
            coarsest[group] = max(
                coarsest.get(group, dtype), dtype, key=lambda each: torch.finfo(each).eps
            )
    return {group: str(dtype).removeprefix("torch.") for group, dtype in coarsest.items()}


def _of_engine(engine: Any) -> torch.dtype:
    dtype = getattr(engine, "communication_data_type", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
