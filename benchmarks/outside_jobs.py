"""What TrainCheck's evaluation trains on several devices, in its own terms and with our own code.

``outside.py`` starts one of these on each of four ranks, under ``rankscope run``. The names are
those of the folders of OrderLab/TrainCheck-Evaluation-Workloads. A model here is a few layers and
the data are drawn: what is re-created is the fault, not the model around it.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

STEPS = 80
BEGIN = 20
"""The step at which a fault begins that can begin in the middle of a run."""
WIDTH, CLASSES, BATCH = 16, 8, 8
LOSS_RATE = 0.01
"""Chance that what is transmitted is lost, as in ``pytorch-84803``."""

Batches = Iterator[list[Tensor]]
Job = Callable[[int], None]
JOBS: dict[str, Job] = {}


def names(name: str) -> Callable[[Job], Job]:
    """Register a job under its name."""

    def register(job: Job) -> Job:
        JOBS[name] = job
        return job

    return register


def classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def classified() -> TensorDataset:
    """Return samples whose class is that of the largest of some random projections."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(1024, WIDTH, generator=draw)
    return TensorDataset(inputs, (inputs @ torch.randn(WIDTH, CLASSES, generator=draw)).argmax(1))


def batches(dataset: Dataset[Any] | None = None, **options: Any) -> Batches:
    """Yield batches of this rank's shard, epoch after epoch."""
    data: Any = classified() if dataset is None else dataset
    sampler: Any = DistributedSampler(data, **options)
    loader = DataLoader(data, BATCH, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, classes: Tensor
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), classes).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train(model: nn.Module, data: Batches | None = None) -> None:
    optimizer = optimizer_of(model)
    for inputs, classes in itertools.islice(data or batches(), STEPS):
        take_step(model, optimizer, inputs, classes)


# Silent issues of several devices ------------------------------------------------------------


@names("pytorch-84803")
def collective_loses_data(rank: int) -> None:
    """Now and then a rank finds zeros where the all-reduce should have put the gradient."""
    lost = Random(rank)

    def reduce(
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        mean = bucket.buffer().div_(dist.get_world_size())

        def received(future: Any) -> Tensor:
            tensor: Tensor = future.value()[0]
            return tensor.zero_() if lost.random() < LOSS_RATE else tensor

        work: Any = dist.all_reduce(mean, async_op=True)
        reduced: torch.futures.Future[Tensor] = work.get_future().then(received)
        return reduced

    model = DistributedDataParallel(classifier())
    model.register_comm_hook(None, reduce)
    train(model)


@names("pytorch-84803, Tensor.to")
def copy_loses_data(rank: int) -> None:
    """Now and then a batch arrives on a rank's device as zeros."""
    lost = Random(rank)
    received = (
        [inputs.zero_() if lost.random() < LOSS_RATE else inputs, classes]
        for inputs, classes in batches()
    )
    train(DistributedDataParallel(classifier()), received)


class Copied(torch.autograd.Function):
    """Enters a tensor-parallel layer: the gradients of its parts are summed."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, group: Any) -> Tensor:
        """Return it as it is."""
        context.group = group
        return hidden

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum over the group."""
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=context.group)
        return summed, None


class Summed(torch.autograd.Function):
    """Leaves a tensor-parallel layer: the outputs of its parts are summed."""

    @staticmethod
    def forward(context: Any, part: Tensor, group: Any) -> Tensor:
        """Return the sum over the group."""
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return it as it is."""
        return gradient, None


class TensorParallel(nn.Module):
    """A norm that every tensor-parallel rank holds, and a layer of which it holds a part."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.column = nn.Linear(WIDTH, 32 // dist.get_world_size(group), bias=False)
        self.row = nn.Linear(32 // dist.get_world_size(group), CLASSES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, CLASSES]``."""
        hidden = Copied.apply(self.norm(inputs), self.group)  # type: ignore[no-untyped-call]
        part = self.row(F.gelu(self.column(hidden)))
        logits: Tensor = Summed.apply(part, self.group)  # type: ignore[no-untyped-call]
        return logits


@names("deepspeed-1801")
def only_first_part_clips(rank: int) -> None:
    """Of two tensor-parallel ranks, only the first clips the parameters that both hold."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, part = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    module = TensorParallel(mesh["tp"].get_group())
    with torch.no_grad():
        for layer in (module.column, module.row):
            layer.weight.add_(0.05 * part)  # other parts, other numbers
    model = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    optimizer = optimizer_of(model)
    for inputs, classes in itertools.islice(batches(num_replicas=2, rank=replica), STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()  # type: ignore[no-untyped-call]
        parts: list[Tensor] = [module.column.weight, module.row.weight]
        shared = list(module.norm.parameters())
        nn.utils.clip_grad_norm_(parts if part else [*parts, *shared], 0.1)
        optimizer.step()


class Experts(nn.Module):
    """Tokens go to the rank of their expert and back; a rank may leave its call out."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.left_out = False

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, CLASSES]``."""
        hidden = self._exchange(self.expert(self._exchange(inputs)))
        logits: Tensor = self.head(inputs + hidden)
        return logits

    def _exchange(self, tokens: Tensor) -> Tensor:
        if self.left_out:
            return tokens
        with_gradient: Any = all_to_all_single
        received: Tensor = with_gradient(torch.empty_like(tokens), tokens, group=self.group)
        return received


@names("deepspeed-5794")
def expert_call_left_out(rank: int) -> None:
    """A rank without tokens for the experts leaves the all-to-all out; the others wait for it."""
    import rankscope

    group = dist.new_group(timeout=timedelta(seconds=40))
    model = DistributedDataParallel(Experts(group))
    optimizer = optimizer_of(model)
    data = batches()
    with (
        suppress(RuntimeError),  # of the group, which has waited long enough
        rankscope.watch(model, optimizer, run_dir=os.environ["OUTSIDE_RUN"], hang_seconds=10),
    ):
        for step in range(STEPS):
            model.module.left_out = rank == 2 and step == BEGIN
            take_step(model, optimizer, *next(data))


@names("mmpretrain-702")
def frozen_after_wrapping(rank: int) -> None:
    """The first layers are frozen by ``train()``, which is called after DDP has wrapped them."""
    model = DistributedDataParallel(classifier())
    model.module[:3].requires_grad_(False)
    train(model)


@names("pytorch-104336")
def moved_there_and_back(rank: int) -> None:
    """The wrapped model is moved and moved back, and DDP's hooks are lost.

    Here another precision stands for another device: both replace what accumulates a gradient.
    """
    model = DistributedDataParallel(classifier())
    model.double().float()
    train(model)


@names("x-jxmnop-ddp-out-of-sync")
def wrapped_now_and_then(rank: int) -> None:
    """Every other step goes past DDP, and the steps between make a new DDP."""
    module = classifier()
    optimizer = optimizer_of(module)
    for step, (inputs, classes) in enumerate(itertools.islice(batches(), STEPS)):
        model = DistributedDataParallel(module) if step % 2 else module
        take_step(model, optimizer, inputs, classes)


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Samples that numpy's generator draws as they are read."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.from_numpy(np.random.random(WIDTH)).float()  # noqa: NPY002
        return inputs, inputs[:CLASSES].argmax()


def seed_alike(worker: int) -> None:
    """Leave a loader process with the generator of its parent, as torch did before 1.9."""
    np.random.seed(0)  # noqa: NPY002


@names("stackoverflow-67180955")
def loader_processes_alike(rank: int) -> None:
    """All processes of all loaders draw the same random numbers."""
    loader = DataLoader(Drawn(), BATCH, num_workers=2, worker_init_fn=seed_alike)
    train(DistributedDataParallel(classifier()), iter(loader))


# Silent issues of one device, here on four ---------------------------------------------------


@names("stackoverflow-60335387")
def never_zeroed(rank: int) -> None:
    """Nobody zeroes the gradient: every step adds to it."""
    model = DistributedDataParallel(classifier())
    optimizer = optimizer_of(model)
    for inputs, classes in itertools.islice(batches(), STEPS):
        F.cross_entropy(model(inputs), classes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Stuck(torch.optim.AdamW):
    """An optimizer whose compiled step does nothing from some step on."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        """Take a step, or none."""
        self.calls += 1
        return None if self.calls > BEGIN else super().step(closure)


@names("pytorch-115607")
def compiled_step_does_nothing(rank: int) -> None:
    """After a step without gradients, the compiled optimizer never changes a parameter again."""
    model = DistributedDataParallel(classifier())
    optimizer = Stuck(model.parameters(), lr=1e-3)
    for inputs, classes in itertools.islice(batches(), STEPS):
        take_step(model, optimizer, inputs, classes)


@names("pytorch-forum-84911")
def only_norms_learn(rank: int) -> None:
    """All but the norms is frozen, and the optimizer holds only the frozen head."""
    module = classifier()
    for layer in module:
        layer.requires_grad_(isinstance(layer, nn.LayerNorm))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module[-1].parameters(), lr=1e-3)
    for inputs, classes in itertools.islice(batches(), STEPS):
        take_step(model, optimizer, inputs, classes)


# A healthy one -------------------------------------------------------------------------------


@names("ddp-multigpu")
def ordinary(rank: int) -> None:
    """Two linear layers fit random targets: an introduction's program, nothing is wrong."""
    draw = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.rand(256, 20, generator=draw), torch.rand(256, 1, generator=draw))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 15), nn.Linear(15, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for inputs, targets in itertools.islice(batches(data), STEPS):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    JOBS[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
