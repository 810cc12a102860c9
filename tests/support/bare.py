"""Training loops without wrapper on one rank, that reduce gradients by themselves or do not."""

import torch
import torch.distributed as dist
from torch import Tensor

from support.loops import PLAN, bits_of, collect_warnings, grad_norm, watch
from support.models import make_batch, make_model

Parameters = list[Tensor]


class BareLoop:
    """A small training of a bare module, watched from its first step on if ``run_dir`` is given.

    Attributes:
        norms: Of each step, the norm of the local gradient, as float64.
    """

    micro_batches = 1

    def __init__(self, rank, run_dir, **options):
        self.rank, self.num_workers = rank, dist.get_world_size()
        self.warnings = collect_warnings()
        self.model = make_model()
        self.prepare()
        self.optimizers = self.make_optimizers()
        torch.manual_seed(100 + rank)
        self.norms = []
        self.scope = None
        if run_dir is not None:
            several = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
            self.scope = watch(self.model, several, run_dir=run_dir, **{"plan": PLAN, **options})

    def prepare(self):
        """Change the model before it is trained."""

    def make_optimizers(self):
        return [torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)]

    @property
    def trained(self):
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def loss(self, step, micro):
        batch = make_batch(self.rank, step * self.micro_batches + micro)
        loss = self.model(**batch)["loss"]
        return loss / self.micro_batches

    def backward(self, loss):
        loss.backward()

    def reduce(self, step):
        for parameter in self.trained:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.num_workers

    def optimize(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self):
        self.model.zero_grad()

    def step(self, step):
        for micro in range(self.micro_batches):
            self.backward(self.loss(step, micro))
        self.norms.append(grad_norm(self.model))
        self.reduce(step)
        self.optimize()
        self.zero()

    def close(self):
        if self.scope is not None:
            self.scope.close()

    def bits(self):
        return bits_of(self.model, self.optimizers)
