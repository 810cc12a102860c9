"""Reads Megatron-core's ``DistributedDataParallel``; Megatron-core is not imported.

Legend of shapes: W workers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.errors import UnsupportedError
from rankscope.gradients.sketch import Measured

_WRAPPERS = "megatron.core.distributed"
_OPTIMIZERS = "megatron.core.optimizer"
_NEEDED = (
    "config", "ddp_config", "buffers", "bucket_groups", "expert_parallel_buffers", "dp_group",
    "dp_cp_group", "tp_group", "pp_group", "finish_grad_sync",
)  # fmt: skip
_NEEDED_OF_GROUPS = "buckets", "start_grad_sync", "grad_reduce_handle"
_NEEDED_OF_BUCKETS = "params_list", "grad_data", "gradient_scaling_factor"


def is_megatron(model: object) -> bool:
    """Return whether a model is in a wrapper of Megatron-core's."""
    return _comes_from(model, _WRAPPERS)


def plain_megatron_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Megatron-core's, which takes hooks; any other as it is.

    None where several are chained, or where there is none inside.
    """
    while _comes_from(optimizer, _OPTIMIZERS) and not isinstance(optimizer, torch.optim.Optimizer):
        chained = getattr(optimizer, "chained_optimizers", None)
        if chained is None:
            optimizer = getattr(optimizer, "optimizer", None)
        else:
            optimizer = chained[0] if len(chained) == 1 else None
    return optimizer


def megatron_process_group(ddp: Any) -> dist.ProcessGroup:
    """Return the ranks over which a wrapper reduces gradients; each of them is a worker.

    Raises:
        UnsupportedError: It works in a way that cannot be watched.
    """
    for reason, present in _obstacles(ddp):
        if present:
            raise UnsupportedError(
                "watch() expected Megatron-core's DistributedDataParallel, and no parallelism but "
                f"that of the data, got {reason}, which cannot be watched"
            )
    group: dist.ProcessGroup = ddp.dp_cp_group
    return group


def megatron_parameters(ddp: Any) -> dict[str, Tensor]:
    """Return the trained parameters whose gradients are reduced, by their names in the module."""
    reduced = {id(parameter) for bucket in _buckets(ddp) for parameter in bucket.params_list}
    named = ddp.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) in reduced}


def is_sharded(ddp: Any) -> bool:
    """Return whether a worker gets a shard of the reduced gradient: the distributed optimizer."""
    return bool(ddp.ddp_config.use_distributed_optimizer)


def factor_of_mean(ddp: Any) -> float:
    """Return the ratio of a reduced gradient to the mean of the workers' local ones.

    It is 1, or W under ``calculate_per_token_loss``, where they are added up.
    """
    first = next(_buckets(ddp))
    adds_up = not ddp.ddp_config.average_in_collective
    return float(first.gradient_scaling_factor) * (ddp.dp_cp_group.size() if adds_up else 1)


def whole_gradients(group: Any, names: Mapping[int, str]) -> list[Measured]:
    """Return the gradients in a group of buckets, each as a view of its buffer.

    Args:
        group: The group.
        names: The parameters' names, by their ``id``; others are left out.
    """
    parameters = [p for bucket in group.buckets for p in bucket.params_list]
    return [(names[id(p)], p.main_grad, 0) for p in parameters if id(p) in names]


def own_shards(group: Any, names: Mapping[int, str]) -> list[Measured]:
    """Return the parts of the gradients of a group that a reduce-scatter reduces for this worker.

    Each bucket is cut into as many equal shards as there are workers; parameters in it begin at
    multiples of 64, with padding before them.

    Args:
        group: As for :func:`whole_gradients`.
        names: As for :func:`whole_gradients`.
    """
    size = group.intra_distributed_optimizer_instance_size
    rank = group.intra_distributed_optimizer_instance_rank
    shards: list[Measured] = []
    for bucket in group.buckets:
        length = bucket.grad_data.numel() // size
        for parameter in bucket.params_list:
            gradient = parameter.main_grad
            at = gradient.storage_offset() - bucket.grad_data.storage_offset()
            start = max(rank * length - at, 0)
            stop = min((rank + 1) * length - at, gradient.numel())
            if start < stop and id(parameter) in names:
                shards.append((names[id(parameter)], gradient.view(-1)[start:stop], start))
    return shards


def _obstacles(ddp: Any) -> Iterator[tuple[str, bool]]:
    missing = _missing(ddp)
    yield f"{type(ddp).__name__} without {', '.join(missing)}", bool(missing)
    config = ddp.config
    settings = ddp.ddp_config
    yield "mixture-of-experts layers", bool(ddp.expert_parallel_buffers)
    yield "no parameter that it reduces", not ddp.bucket_groups
    yield "tensor parallelism", _size(ddp.tp_group) > 1
    yield "pipeline parallelism", _size(ddp.pp_group) > 1
    yield "context parallelism", _size(ddp.dp_cp_group) != _size(ddp.dp_group)
    yield "FP8", any(getattr(config, name, None) for name in ("fp8", "fp4"))
    yield "CUDA graphs", getattr(config, "cuda_graph_impl", "none") != "none"
    for name in ("overlap_param_gather", "delay_wgrad_compute"):
        yield name, bool(getattr(settings, name, False))
    instances = getattr(settings, "num_distributed_optimizer_instances", 1)
    yield "num_distributed_optimizer_instances above 1", instances > 1


def _missing(ddp: Any) -> list[str]:
    missing = [name for name in _NEEDED if not hasattr(ddp, name)]
    for group in () if missing else ddp.bucket_groups:
        missing += [name for name in _NEEDED_OF_GROUPS if not hasattr(group, name)]
        for bucket in getattr(group, "buckets", ()):
            missing += [name for name in _NEEDED_OF_BUCKETS if not hasattr(bucket, name)]
    return list(dict.fromkeys(missing))


def _size(group: Any) -> int:
    groups = group if isinstance(group, list) else [group]
    return max(int(each.size()) for each in groups)


def _comes_from(value: object, package: str) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(value).__mro__)


def _buckets(ddp: Any) -> Iterator[Any]:
    for group in ddp.bucket_groups:
        yield from group.buckets
