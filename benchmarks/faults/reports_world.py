"""Public reports of ranks that belong together: groups that never meet, other axes, experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from .job import Job, injects


class Sharded(Job):
    """A model under FSDP2, whose sampler shards over all ranks."""

    from_the_start = True

    def mesh(self) -> DeviceMesh:
        """Return the mesh that ``fully_shard`` gets: two replicas of two shards."""
        shape = (self.num_workers // 2, 2)
        return init_device_mesh("cpu", shape, mesh_dim_names=("rep", "shard"))

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = self.mesh()
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module

    def random_seed(self) -> int:
        return self.seed


@injects("HP17")
class BothAxes(Sharded):
    pass


@injects("P17")
class OneAxisFromGroup(Sharded):
    def mesh(self) -> DeviceMesh:
        pairs = [[first, first + 1] for first in range(0, self.num_workers, 2)]
        groups = [dist.new_group(pair) for pair in pairs]
        own = groups[self.rank // 2]
        mesh: DeviceMesh = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("shard",))
        return mesh


@injects("P18")
class ShardsOfOne(Sharded):
    def mesh(self) -> DeviceMesh:
        shape = (self.num_workers, 1)
        return init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))["fsdp"]


@injects("HP18")
class ReplicasOfOne(Sharded):
    def mesh(self) -> DeviceMesh:
        shape = (self.num_workers, 1)
        return init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))
