"""Public reports of ranks that belong together: groups that never meet, other axes, experts."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from .job import Job, Trial, injects
from .mesh_faults import MeshJob, exchange
from .model import IGNORED, VOCABULARY, WIDTH, Batch, BenchCausalLM


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


def _same(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    return given.clone()


def _sum(given: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = given.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def _sum_part(whole: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return _sum(whole, group).chunk(group.size(), dim)[group.rank()].contiguous()


class VocabularyParallelCausalLM(BenchCausalLM):
    """Each rank along an axis holds a part of the head's rows; the loss smooths its labels.

    Args:
        mesh: The axis.
        local_mean: Whether the smoothing takes the mean over this rank's part alone.
    """

    SMOOTHING = 0.1

    def __init__(self, mesh: DeviceMesh, *, local_mean: bool) -> None:
        super().__init__()
        weight = distribute_tensor(self.head.weight.detach(), mesh, [Shard(0)])
        self.head.weight = nn.Parameter(weight)
        self._group = mesh.get_group()
        self._local_mean = local_mean

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the mean loss per label token."""
        group = self._group
        hidden = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        copied = exchange(self.norm(hidden)[:, :-1], group, _same, _sum)
        logits = copied @ self.head.weight.to_local().t()  # type: ignore[attr-defined]
        rows = logits.shape[-1]
        local = labels[:, 1:] - group.rank() * rows
        inside = (local >= 0) & (local < rows)
        picked = logits.gather(-1, local.clamp(0, rows - 1)[..., None])[..., 0]
        target = exchange(picked.where(inside, torch.zeros(())), group, _sum, _same)
        total = exchange(logits.exp().sum(-1), group, _sum, _same).log()
        if self._local_mean:
            mean = logits.mean(-1)
        else:
            mean = exchange(logits.sum(-1), group, _sum, _same) / VOCABULARY
        smooth = (1 - self.SMOOTHING) * target + self.SMOOTHING * mean
        return {"loss": (total - smooth).mean()}


@injects("HP19")
class SmoothedByTheWholeMean(MeshJob):
    from_the_start = True
    forgets = False
    local_mean: ClassVar[bool] = False

    def build_model(self) -> nn.Module:
        return VocabularyParallelCausalLM(self.mesh["tp"], local_mean=self.local_mean)


@injects("P19")
class SmoothedByTheLocalMean(SmoothedByTheWholeMean):
    local_mean = True


class CutCausalLM(BenchCausalLM):
    """Each rank of a group has a part of every sequence, and attends to all of it.

    Args:
        group: The ranks that share a sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the mean loss per label token of this rank's part."""
        group, length = self._group, input_ids.shape[1]
        first = group.rank() * length
        hidden = self.embedding(input_ids) + self.positions(torch.arange(first, first + length))
        whole = exchange(
            hidden, group, lambda t, g: _gather(t, g, 1), lambda t, g: _sum_part(t, g, 1)
        )
        for block in self.blocks:
            whole = block(whole)
        logits = self.head(self.norm(whole[:, first : first + length]))
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        targets = shift_labels.flatten()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED)}


class Cut(Job):
    """A job whose pairs of ranks share sequences; FSDP2 averages over all ranks."""

    from_the_start = True

    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        shape = (trial.num_workers // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        self.all = mesh["dp", "cp"]._flatten("dp_cp")
        self.cp = mesh["cp"].get_group()
        self.dp = mesh["dp"]

    def build_model(self) -> nn.Module:
        return CutCausalLM(self.cp)

    def wrap(self, module: nn.Module) -> nn.Module:
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=self.all)
        fully_shard(module, mesh=self.all)
        return module

    def indices(self, epoch: int) -> list[int]:
        rank, workers = self.rank, self.num_workers
        self.rank, self.num_workers = self.dp.get_local_rank(), self.dp.size()
        found = super().indices(epoch)
        self.rank, self.num_workers = rank, workers
        return found

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor ``[B, L]``."""
        return whole.chunk(self.cp.size(), dim=1)[self.cp.rank()].contiguous()


@injects("P20")
class ShiftedInsideParts(Cut):
    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        return Batch(self.part(batch.input_ids), self.part(batch.labels))


@injects("HP20")
class ShiftedBeforeTheCut(Cut):
    def collate(self, indices: list[int]) -> Batch:
        batch = super().collate(indices)
        shifted = F.pad(batch.labels, (0, 1), value=IGNORED)[:, 1:]
        return Batch(self.part(batch.input_ids), self.part(shifted))

    def factors(self, batches: list[Batch]) -> list[float]:
        counts = [int((batch.labels != IGNORED).sum()) for batch in batches]
        total = torch.tensor(float(sum(counts)))
        dist.all_reduce(total)
        return [self.num_workers * count / float(total) for count in counts]

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(input_ids=batch.input_ids, shift_labels=batch.labels)["loss"]
        return loss


class ExpertsOfAllTokens(nn.Module):
    """A router, and one expert per rank of a group, which receives the tokens of all its ranks.

    Args:
        mesh: The axis along which each rank has an expert.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, mesh.size(), bias=False)
        self.experts = OneExpert(mesh)
        self._group = mesh.get_group()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        group = self._group
        shares = self.router(hidden).softmax(-1)
        given = exchange(
            torch.cat([hidden, shares], -1),
            group,
            lambda t, g: _gather(t, g, 0),
            lambda t, g: _sum_part(t, g, 0),
        )
        made = self.experts(given[..., :WIDTH]) * given[..., WIDTH + group.rank(), None]
        return exchange(made, group, lambda t, g: _sum_part(t, g, 0), lambda t, g: _gather(t, g, 0))


class OneExpert(nn.Module):
    """This rank's expert; all of them are one DTensor.

    Args:
        mesh: The axis along which each rank has one.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weights = torch.randn(mesh.size(), WIDTH, WIDTH) / WIDTH**0.5
        self.weights = nn.Parameter(distribute_tensor(weights, mesh, [Shard(0)]))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, WIDTH]``."""
        return F.gelu(hidden @ self.weights.to_local()[0])  # type: ignore[attr-defined]


@injects("HP21")
class ExpertsDividedByAll(Job):
    from_the_start = True
    divided = True

    def __init__(self, trial: Trial, rank: int) -> None:
        super().__init__(trial, rank)
        shape = (trial.num_workers // 2, 2)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.mlp = ExpertsOfAllTokens(self.mesh["ep"])
        return model

    def wrap(self, module: nn.Module) -> nn.Module:
        whole = self.mesh["dp", "ep"]._flatten("all")
        for block in module.blocks:  # type: ignore[union-attr]
            experts: Any = block.mlp.experts
            fully_shard(experts, mesh=self.mesh["dp"], shard_placement_fn=lambda p: Shard(1))
            if self.divided:
                experts.set_gradient_divide_factor(float(self.num_workers))
                experts.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing
            fully_shard(block, mesh=whole)
        fully_shard(module, mesh=whole)
        return module


@injects("P21")
class ExpertsDividedByTheirMesh(ExpertsDividedByAll):
    divided = False
