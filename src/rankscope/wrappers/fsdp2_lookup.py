"""The shard that belongs to a parameter under FSDP2, while its module computes."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from rankscope.wrappers.fsdp2_model import every_parameter, managed_parameters


class ShardLookup:
    """Finds the shard of a parameter that FSDP2 replaces in its module from time to time.

    While a layer computes, its module holds the whole parameter; the root's does so from before
    the hooks of a forward pass until its backward pass ends, and after an evaluation. Name,
    gradient and optimizer state belong to the shard, which stays.

    Args:
        model: The model, or a module around it.
        workers: As for :func:`managed_parameters`.
    """

    def __init__(self, model: nn.Module, workers: Collection[int] = ()) -> None:
        self._managed: dict[tuple[nn.Module, str], Any] = {}
        replicas = managed_parameters(model, workers)[0].group.replicas
        for managed in every_parameter(model):
            if managed.group.replicas == replicas:
                inside = managed.inside
                info = inside._module_info
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                for place in ((info.module, info.param_name), *shared):
                    self._managed[place] = inside

    def __call__(self, holder: nn.Module, key: str) -> Tensor | None:
        """Return the shard of the parameter ``key`` of a module; None if FSDP2 does not manage it.

        FSDP2 does not reduce a parameter that it ignores, or that lies outside of all sharded
        modules. None as well for one on another mesh: its replicas are other workers than those of
        the compared parameters.
        """
        inside = self._managed.get((holder, key))
        shard: Tensor | None = None if inside is None else inside.sharded_param
        return shard
