"""Training loops without wrapper on one rank, that reduce gradients by themselves or do not."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.loops import PLAN, bits_of, collect_warnings, watch
from support.models import TinyLM, make_batch, make_model

Parameters = list[Tensor]


class BareLoop:
    """A small training of a bare module, watched from its first step on if ``run_dir`` is given.

    Attributes:
        norms: Of each step, the norm of the local gradient, as float64.
    """

    micro_batches = 1

    def __init__(self, rank: int, run_dir: str | None, **options: Any) -> None:
        self.rank, self.num_workers = rank, dist.get_world_size()
        self.warnings = collect_warnings()
        self.model: TinyLM = make_model()
        self.prepare()
        self.optimizers = self.make_optimizers()
        torch.manual_seed(100 + rank)
        self.norms: list[float] = []
        self.scope: Any = None
        if run_dir is not None:
            several = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
            self.scope = watch(self.model, several, run_dir=run_dir, **{"plan": PLAN, **options})

    def prepare(self) -> None:
        """Change the model before it is trained."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)]

    @property
    def trained(self) -> Parameters:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def loss(self, step: int, micro: int) -> Tensor:
        batch = make_batch(self.rank, step * self.micro_batches + micro)
        loss: Tensor = self.model(**batch)["loss"]
        return loss / self.micro_batches

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self, step: int) -> None:
        for parameter in self.trained:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.num_workers

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self) -> None:
        self.model.zero_grad()

    def step(self, step: int) -> None:
        for micro in range(self.micro_batches):
            self.backward(self.loss(step, micro))
        squares = [p.grad.double().square().sum() for p in self.trained if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))
        self.reduce(step)
        self.optimize()
        self.zero()

    def close(self) -> None:
        if self.scope is not None:
            self.scope.close()

    def bits(self) -> dict[str, bytes]:
        return bits_of(self.model, self.optimizers)
