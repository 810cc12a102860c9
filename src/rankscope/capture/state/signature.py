"""Whether a model's parameters and buffers are the same as before: soon told, in each rotation."""

from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

_of_tensor = attrgetter("shape", "dtype", "requires_grad")
_held = attrgetter("_modules", "_parameters", "_buffers")


def signature(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[object] | None:
    """Return what a survey of the model goes by, in a form that is soon made and compared.

    Returns:
        Equal lists for a model in which nothing of it has changed; None where that cannot be told,
        as of parameters without a shape as yet.
    """
    try:
        groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
        holders, seen = [module], {id(module)}
        for holder in holders:
            for inner in holder._modules.values():
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    holders.append(inner)
        held = list(chain.from_iterable(map(_held, holders)))
        values = list(chain.from_iterable(map(dict.values, held)))
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [
            [list(map(id, group)) for group in groups],
            list(map(list, held)),
            list(map(id, values)),
            list(map(_of_tensor, tensors)),
        ]
    except Exception:
        return None
