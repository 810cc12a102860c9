"""The training job of the bench: small and ordinary, with a hook for everything that can go wrong.

A fault is a subclass that overrides a hook or two. The healthy job weighs every token alike: the
local mean is multiplied by its share of the step's label tokens, times the number of workers.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from rankscope import watch

from .model import IGNORED, LENGTH, PAD, Batch, BenchCausalLM, load_samples

PATIENCE_SECONDS = 300.0
"""With an agent to which a busy machine leaves no time: what it misses would be held against it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a fault.

    Attributes:
        fault: Its id.
        num_workers: W.
        seed: Seed of everything; it also chooses the worker that is hit.
        num_steps: Optimizer steps.
        start: The step at which a fault begins that can begin in the middle of a run.
        run_dir: Where the run is recorded.
    """

    fault: str
    num_workers: int
    seed: int
    num_steps: int
    start: int
    run_dir: Path

    @property
    def worker(self) -> int:
        """The worker that a fault of a single worker hits; never rank 0, which is special."""
        return 1 + self.seed % (self.num_workers - 1)


class Job:
    """A training job on one rank; an ordinary one, until a subclass changes it.

    Attributes:
        from_the_start: Whether the fault is there from step 0, not only from ``trial.start``.
        num_samples: Size of the data set.
        batch_size: Samples of a micro-batch on one worker.
        accumulation: Micro-batches of a step.
        dropout: Dropout probability.
        between: Makes what sits between the model's embedding and its blocks.
        ragged: Whether the samples' lengths differ; they are padded then.
        peak_rate: The learning rate, before any schedule.
        ddp_options: Options of DDP.
        watch_options: Options of ``rankscope.watch``, beyond the defaults.
        num_sessions: How often the job is started; more than once: it is resumed.
    """

    from_the_start: ClassVar[bool] = False
    num_samples: int = 960
    batch_size: int = 4
    accumulation: int = 1
    dropout: float = 0.0
    between: ClassVar[type[nn.Module]] = nn.Identity
    ragged: bool = False
    peak_rate: float = 1e-3
    ddp_options: ClassVar[Mapping[str, Any]] = {}
    watch_options: ClassVar[Mapping[str, Any]] = {}
    num_sessions: int = 1

    def __init__(self, trial: Trial, rank: int) -> None:
        self.trial = trial
        self.rank = rank
        self.num_workers = trial.num_workers
        self.seed = trial.seed
        self.step = 0
        self.session = 0
        self.use_samples(self.num_samples)
        self.module: Any = None
        self.model: Any = None
        self.scope: Any = None
        self.optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]

    @classmethod
    def begin(cls, trial: Trial) -> int:
        """Return the first step that the fault can show in."""
        return 0 if cls.from_the_start else trial.start

    @property
    def active(self) -> bool:
        """Whether the fault has begun."""
        return self.from_the_start or self.step >= self.trial.start

    @property
    def hit(self) -> bool:
        """Whether the fault has begun, and this is the worker that it hits."""
        return self.active and self.rank == self.trial.worker

    def use_samples(self, number: int) -> None:
        """Take so many samples as the data set, or all that there are."""
        self.samples = load_samples(self.seed)[:number]
        self.num_samples = len(self.samples)

    # Data ----------------------------------------------------------------------------------

    def indices(self, epoch: int) -> list[int]:
        """Return the samples of an epoch on this worker, in order."""
        sampler = self.sampler()
        sampler.set_epoch(epoch)
        return list(sampler)

    def sampler(self, *, rank: int | None = None, seed: int | None = None) -> Any:
        """Return torch's own sampler, which shards by rank."""
        return DistributedSampler(
            range(self.num_samples),  # type: ignore[arg-type]
            self.num_workers,
            self.rank if rank is None else rank,
            seed=self.seed if seed is None else seed,
        )

    def draw(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other; incomplete ones are dropped."""
        for epoch in itertools.count():
            indices = self.indices(epoch)
            for begin in range(0, len(indices) - self.batch_size + 1, self.batch_size):
                yield indices[begin : begin + self.batch_size]

    def batches(self) -> Iterator[Batch]:
        """Yield one batch after the other."""
        return map(self.collate, self.draw())

    def collate(self, indices: list[int]) -> Batch:
        """Return samples as a batch."""
        tokens = self.samples[indices]
        if not self.ragged:
            return Batch(tokens, tokens.clone())
        lengths = torch.tensor([self.length_of(index) for index in indices])
        mask = torch.arange(LENGTH) < lengths[:, None]
        return Batch(tokens.where(mask, PAD), tokens.where(mask, IGNORED), mask.long())

    def length_of(self, index: int) -> int:
        """Return the length of a sample, from 4 to ``LENGTH`` tokens: most short, a long tail."""
        return 4 + int((LENGTH - 4) * random.Random(index).random() ** 3)

    # Model ---------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Return the bare model; it is seeded alike on all ranks."""
        model = BenchCausalLM(self.dropout)
        model.between = self.between()
        return model

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the data-parallel model."""
        ddp = DistributedDataParallel(module, **self.ddp_options)
        if type(self).reduce is not Job.reduce:
            ddp.register_comm_hook(self, reduce_bucket)
        return ddp

    def after_wrap(self) -> None:
        """Do something before the optimizer is made."""

    def random_seed(self) -> int:
        """Return the seed of this rank's random generators: one of its own."""
        return self.seed + 1000 * self.rank

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.peak_rate)

    # One step ------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Do something before the step's first forward pass."""

    def factors(self, batches: list[Batch]) -> list[float]:
        """Return what the loss of each micro-batch is multiplied by: every token counts alike."""
        counts = [batch.num_labels for batch in batches]
        total = torch.tensor(float(sum(counts)))
        dist.all_reduce(total)
        return [self.num_workers * count / float(total) for count in counts]

    def synchronising(self, micro: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch: only the last one reduces gradients."""
        last: bool = micro == self.accumulation - 1
        return nullcontext() if last else self.model.no_sync()

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch: the mean over its label tokens."""
        masked = {} if batch.attention_mask is None else {"attention_mask": batch.attention_mask}
        loss: Tensor = self.model(input_ids=batch.input_ids, labels=batch.labels, **masked)["loss"]
        return loss

    def before_backward(self, micro: int) -> None:
        """Do something between the forward and the backward pass."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self, bucket: Tensor) -> Tensor:
        """Return the mean over workers of a flat bucket of gradients ``[n]``.

        A fault that overrides it takes the place of DDP's own all-reduce.
        """
        dist.all_reduce(bucket)
        return bucket.div_(self.num_workers)

    def after_backward(self) -> None:
        """Do something with the reduced gradient before the optimizer's step."""

    def rate(self) -> float:
        """Return the learning rate of this step."""
        return self.scheduled_rate(self.step)

    def scheduled_rate(self, step: int) -> float:
        """Return the learning rate that the schedule has at a step: constant."""
        return self.peak_rate

    def optimize(self) -> None:
        """Take an optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()

    def after_optimizer(self) -> None:
        """Do something at the end of a step."""

    # The loop ------------------------------------------------------------------------------

    def plan(self) -> Mapping[str, Any]:
        """Return what the user intends, where only a plan can show the fault; else nothing."""
        return {}

    def steps_of(self, session: int) -> range:
        """Return the steps of a session."""
        ends = [self.trial.num_steps * n // self.num_sessions for n in (session, session + 1)]
        return range(*ends)

    def prepare(self) -> None:
        """Build model and optimizer."""
        seed_everything(self.seed)
        self.module = self.build_model()
        self.model = self.wrap(self.module)
        self.after_wrap()
        self.optimizer = self.make_optimizer()
        seed_everything(self.random_seed())

    def before_session(self) -> None:
        """Do something before a session begins, such as to load a checkpoint."""

    def train(self) -> list[Path]:
        """Train, watched.

        Returns:
            The directories that were recorded, in order; nothing except on rank 0.
        """
        self.prepare()
        directories = []
        options = {"overhead_budget": None, "announce": False, **self.options()}
        if self.plan():
            options["plan"] = dict(self.plan())
        for session in range(self.num_sessions):
            self.session = session
            self.before_session()
            batches = self.batches()
            with watch(self.model, self.optimizer, run_dir=self.trial.run_dir, **options) as scope:
                self.scope = scope
                for step in self.steps_of(session):
                    self.step = step
                    self.train_step(batches)
                scope.close(PATIENCE_SECONDS)
            directories += [] if scope.run_dir is None else [scope.run_dir]
        return directories

    def options(self) -> dict[str, Any]:
        """Return the options of ``rankscope.watch``, beyond the defaults."""
        return dict(self.watch_options)

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Train one step."""
        self.before_step()
        drawn = [next(batches) for _ in range(self.accumulation)]
        for micro, (batch, factor) in enumerate(zip(drawn, self.factors(drawn), strict=True)):
            with self.synchronising(micro):
                loss = self.forward(batch)
                self.before_backward(micro)
                self.backward(loss * factor)
        self.after_backward()
        self.optimize()
        self.after_optimizer()
        self.optimizer.zero_grad()


def reduce_bucket(
    job: Job,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of DDP's by the job's own :meth:`Job.reduce`."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(job.reduce(bucket.buffer()))
    return future


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what training scripts use
    torch.manual_seed(seed)


INJECTORS: dict[str, type[Job]] = {}
"""The job of every fault and look-alike that is reproduced, by id."""


def injects(name: str) -> Callable[[type[Job]], type[Job]]:
    """Register a job as that of a fault, by its id in the catalogue."""

    def register(job: type[Job]) -> type[Job]:
        INJECTORS[name] = job
        return job

    return register
