"""Whether a model's parameters and buffers are the same as before: soon told, in each rotation."""

import torch
from torch import nn


def signature(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[object] | None:
    """Return what a survey of the model goes by, in a form that is soon made and compared.

    Returns:
        Equal lists for a model in which nothing of it has changed; None where that cannot be told,
        as of parameters without a shape as yet.
    """
    marks: list[object] = []
    seen: set[int] = set()
    waiting = [module]
    try:
        for group in getattr(optimizer, "param_groups", ()):
            marks += map(id, group["params"])
        while waiting:
            holder = waiting.pop()
            marks.append(id(holder))
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            marks += holder._modules
            waiting += (inner for inner in holder._modules.values() if inner is not None)
            for tensors in (holder._parameters, holder._buffers):
                for key, tensor in tensors.items():
                    marks += (key, id(tensor))
                    if tensor is not None:
                        marks += (tensor.shape, tensor.dtype, tensor.requires_grad)
    except Exception:
        return None
    return marks
