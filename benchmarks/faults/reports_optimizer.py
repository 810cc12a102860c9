"""Reports of this year about the optimizer's own state (P8 to P12), beside right versions (HP)."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from .job import Job, Trial, injects
from .model import NUM_BLOCKS, WIDTH


@injects("P8")
class SteppedBeforeTraining(Job):
    """Creates the optimizer's state by an update with zero gradients and a rate of 0."""

    from_the_start = True

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


@injects("HP8")
class CountedFromZero(SteppedBeforeTraining):
    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        for state in optimizer.state.values():
            state["step"].zero_()
        return optimizer


class Resumed(Job):
    """Trains twice, the second time from what the first has saved, on the samples that follow."""

    num_samples = 3000
    num_sessions = 2

    @classmethod
    def begin(cls, trial: Trial) -> int:
        return trial.num_steps // cls.num_sessions

    def draw(self) -> Iterator[list[int]]:
        return itertools.islice(super().draw(), self.steps_of(self.session).start, None)

    def after_optimizer(self) -> None:
        if self.session == 0 and self.step == self.steps_of(0)[-1]:
            self.save()

    def before_session(self) -> None:
        if self.session:
            self.prepare()
            self.load()

    def save(self) -> None:
        """Save what the second session begins with."""

    def load(self) -> None:
        """Load it into a new model and optimizer."""


class Sharded(Resumed):
    """FSDP2 with ``torch.distributed.checkpoint``."""

    def wrap(self, module: Any) -> nn.Module:
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
        wrapped: nn.Module = module
        return wrapped

    def save(self) -> None:
        folder = [tempfile.mkdtemp(prefix="rankscope-faults-") if self.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        self.folder = Path(folder[0])
        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder)


@injects("P9")
class LoadedIntoEmptyState(Sharded):
    def load(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        load(state, checkpoint_id=self.folder, planner=DefaultLoadPlanner(allow_partial_load=True))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@injects("HP9")
class LoadedIntoCreatedState(Sharded):
    def load(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Jitter(nn.Module):
    """Multiplies by noise near 1, from a generator of its own, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, hidden: Tensor) -> Tensor:
        noise: Tensor = torch.rand(hidden.shape, generator=self.generator)
        return hidden * (0.99 + 0.02 * noise)


@injects("P10")
class RandomStateOfRankZero(Resumed):
    between = Jitter

    def after_wrap(self) -> None:
        self.module.between.generator.manual_seed(self.random_seed())

    def save(self) -> None:
        self.saved = (
            {name: tensor.clone() for name, tensor in self.module.state_dict().items()},
            _copy(self.optimizer.state_dict()),
            self.module.between.generator.get_state(),
        )

    def load(self) -> None:
        model, optimizer, random = self.saved
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        dist.broadcast(random, src=0)
        self.module.between.generator.set_state(random)


@injects("HP10")
class OwnRandomState(RandomStateOfRankZero):
    def load(self) -> None:
        model, optimizer, random = self.saved
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.module.between.generator.set_state(random)


def _copy(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return [_copy(value) for value in state] if isinstance(state, list) else state


@injects("HP11")
class OwnersByHand(Job):
    """Each rank updates its share of the parameters and gives it to the others: ZeRO 1."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.parameters = list(self.module.parameters())
        own = self.parameters[self.rank :: self.num_workers]
        return torch.optim.AdamW(own, lr=self.peak_rate)

    def optimize(self) -> None:
        super().optimize()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                dist.broadcast(parameter, src=number % self.num_workers)

    def after_optimizer(self) -> None:
        self.module.zero_grad()


class LowPrecision(Job):
    """A model in bfloat16, with RMSNorm."""

    from_the_start = True
    peak_rate = 1e-4

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        for block in model.blocks:
            block.norm_attention = nn.RMSNorm(WIDTH)
            block.norm_mlp = nn.RMSNorm(WIDTH)
        model.norm = nn.RMSNorm(WIDTH)
        bare: nn.Module = model.bfloat16()
        return bare


@injects("P12")
class NormsNeverMove(LowPrecision):
    pass


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW that rounds each new value up or down at random, so that the mean is right."""

    def __init__(self, parameters: Any, lr: float, seed: int) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient = parameter.grad.float()
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(gradient)
                    state["exp_avg_sq"] = torch.zeros_like(gradient)
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
                count = float(state["step"])
                size = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
                update = state["exp_avg"] / (1 - first**count) / size
                exact = parameter.float() - group["lr"] * update
                bits = exact.view(torch.int32)
                noise = torch.randint(
                    1 << 16, bits.shape, dtype=torch.int32, generator=self._generator
                )
                rounded = (bits + noise) & -(1 << 16)
                parameter.copy_(rounded.view(torch.float32))


@injects("HP12")
class RoundedAtRandom(LowPrecision):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return StochasticAdamW(self.module.parameters(), self.peak_rate, self.seed)


@injects("HP13")
class MasterWeights(LowPrecision):
    """The optimizer updates float32 copies; the norms of the first block are frozen by design."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.blocks[NUM_BLOCKS - 1].norm_mlp.requires_grad_(False)
        bare: nn.Module = model
        return bare

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in trained]
        return torch.optim.AdamW([master for _, master in self.pairs], lr=self.peak_rate)

    def optimize(self) -> None:
        for parameter, master in self.pairs:
            master.grad = parameter.grad.float()
        super().optimize()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def after_optimizer(self) -> None:
        self.module.zero_grad()
