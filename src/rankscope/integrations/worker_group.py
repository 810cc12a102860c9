"""Finds the workers of a model without wrapper where the job has other axes, such as a pipeline's.

Ranks whose models have other trained parameters hold other parts of a model. Those with the same
ones are its workers, if the training has made a process group of exactly them.
"""

import hashlib
from typing import Any

import torch.distributed as dist
from torch import nn

from rankscope.private import find
from rankscope.wrappers.rendezvous import agree, default_store


def find_worker_group(model: nn.Module) -> Any:
    """Return the process group of the workers of a model without wrapper; None for all ranks.

    Every rank of the job calls it at the same point of the program; it makes no collective call.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore("rankscope-run/workers", default_store())
    store.set(str(rank), parameters_digest(model))
    if agree(c10d.PrefixStore("met", store), num_ranks):
        return None
    digests = store.multi_get([str(other) for other in range(num_ranks)])
    ranks = [other for other, digest in enumerate(digests) if digest == digests[rank]]
    if len(ranks) == num_ranks:
        return None
    group = group_of(ranks) if len(ranks) > 1 else None
    problem = "" if group is not None else f"rank {rank} has no group of its model's workers"
    return None if agree(c10d.PrefixStore("found", store), num_ranks, problem) else group


def parameters_digest(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a model's trained parameters."""
    trained = sorted((n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad)
    return hashlib.blake2b(repr(trained).encode(), digest_size=16).hexdigest()


def group_of(ranks: list[int]) -> Any:
    """Return the training's process group of exactly these ranks; None if it made none."""
    for group in find("torch.distributed.distributed_c10d._world.pg_map") or ():
        if isinstance(group, dist.ProcessGroup) and dist.get_process_group_ranks(group) == ranks:
            return group
    return None
