"""Public reports of wrong updates, after a right gradient, beside their right versions."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .job import Job, injects
from .mesh_faults import MeshJob

VERIFIED: Mapping[str, Any] = {"verify_at": [8]}


class Muon(torch.optim.Optimizer):
    """Muon on matrices that ranks share.

    Args:
        matrices: The matrices.
        lr: The learning rate.
        gathered: Axes of the mesh over which a matrix is gathered before its update.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, gathered: tuple[str, ...]) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": 0.9, "gathered": gathered})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter.grad))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                if isinstance(momentum, DTensor):
                    self._update_part(parameter.to_local(), momentum, group)
                else:
                    parameter.add_(orthogonal(momentum), alpha=-group["lr"])

    @staticmethod
    def _update_part(part: Tensor, momentum: DTensor, group: Mapping[str, Any]) -> None:
        mesh = momentum.device_mesh
        names = mesh.mesh_dim_names or ()
        axes = [axis for axis, name in enumerate(names) if name in group["gathered"]]
        gathered = momentum
        for axis in axes:
            placements = list(gathered.placements)
            placements[axis] = Replicate()
            gathered = gathered.redistribute(placements=placements)
        update = orthogonal(gathered.to_local())
        for axis in reversed(axes):  # the rank's own part of it
            placement: Any = momentum.placements[axis]
            if not placement.is_replicate():
                own = mesh.get_local_rank(axis)
                update = update.chunk(mesh.size(axis), placement.dim)[own]
        part.add_(update, alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with all singular values near 1, by Newton and Schulz."""
    wide: Tensor = matrix.bfloat16() / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    return wide.type_as(matrix)


class Several(list[torch.optim.Optimizer]):
    """Several optimizers, with what a loop calls."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for each in self for group in each.param_groups]

    def step(self) -> None:
        """Call all."""
        for each in self:
            each.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for each in self:
            each.zero_grad()


class MuonJob(MeshJob):
    """Matrices of the blocks are updated by Muon, by hand or by torch, the rest by AdamW.

    Attributes:
        gathered: Axes of the mesh over which a matrix is gathered before its update.
    """

    from_the_start = True
    forgets = False
    watch_options = VERIFIED
    gathered: ClassVar[tuple[str, ...]] = ("dp", "tp")

    def make_optimizer(self) -> Any:
        named = dict(self.model.named_parameters())
        in_blocks = {n: p for n, p in named.items() if p.ndim == 2 and "blocks" in n}
        by_torch = [p for n, p in in_blocks.items() if "mlp" not in n]
        rest = [p for n, p in named.items() if n not in in_blocks]
        by_hand = [p for n, p in in_blocks.items() if "mlp" in n]
        return Several(
            [
                Muon(by_hand, self.peak_rate, self.gathered),
                torch.optim.Muon(by_torch, self.peak_rate),
                torch.optim.AdamW(rest, lr=self.peak_rate),
            ]
        )


@injects("P26")
class MuonOnTensorParallelParts(MuonJob):
    gathered = ("dp",)


@injects("HP26")
class MuonOnWholeMatrices(MuonJob):
    pass


@injects("P27")
class MasterNotCopiedBack(Job):
    """A model in bfloat16, whose optimizer holds copies in float32."""

    from_the_start = True
    watch_options = VERIFIED
    forgotten = "blocks.1.output.weight"

    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16()

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.masters = {n: p.detach().float() for n, p in self.module.named_parameters()}
        for master in self.masters.values():
            master.requires_grad_()
        return torch.optim.AdamW(list(self.masters.values()), lr=self.peak_rate)

    def optimize(self) -> None:
        named = dict(self.module.named_parameters())
        for name, master in self.masters.items():
            master.grad = named[name].grad.float()
        super().optimize()
        self.module.zero_grad()
        with torch.no_grad():
            for name, master in self.masters.items():
                if name != self.forgotten:
                    named[name].copy_(master)


class RoundingAtRandom(torch.optim.Optimizer):
    """AdamW in bfloat16 that rounds the parameter at random, without a bias.

    Args:
        parameters: The parameters.
        lr: The learning rate.
        seed: Seed of the rounding, equal on all ranks.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, seed: int) -> None:
        super().__init__(parameters, {"lr": lr})
        self.draw = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.float()
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=gradient * 0, square=gradient * 0)
                state["step"] += 1
                mean = state["mean"].lerp_(gradient, 0.1) / (1 - 0.9 ** state["step"])
                square = state["square"].lerp_(gradient**2, 0.001) / (1 - 0.999 ** state["step"])
                moved = parameter.float() - group["lr"] * mean / (square.sqrt() + 1e-8)
                noise = torch.randint(2**16, moved.shape, generator=self.draw, dtype=torch.int32)
                bits = (moved.view(torch.int32) + noise) & -(2**16)
                parameter.copy_(bits.view(torch.float32))


@injects("HP27")
class RoundsAtRandom(Job):
    watch_options = VERIFIED

    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return RoundingAtRandom(list(self.module.parameters()), self.peak_rate, self.seed)
