"""Small real training jobs for the detection bench: healthy ones, and ones with a fault.

Each job says which samples a worker draws, and what goes wrong on one of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankscope.lab.study.config import Combination, Setting, ShardReading
from rankscope.lab.study.encoding import IGNORED, EncodedSet, draw_batches

WORKERS = 8
FAULTY = 5
BATCH = 4
Batch = dict[str, Tensor]
Positions = Iterator[list[int]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a job knows on one worker.

    Attributes:
        samples: The encoded records.
        rank: This worker.
        vocab_size: Tokens of the model.
        domains: Kind of task of each sample ``[N]``.
    """

    samples: EncodedSet
    rank: int
    vocab_size: int
    domains: NDArray[np.int64]


def sharded(setup: Setup, batch: int = BATCH) -> Positions:
    """Draw from a ``DistributedSampler``: the usual way."""
    return draw_batches(
        Combination(ShardReading.SHARDED, Setting.S1_1),
        num_samples=len(setup.samples),
        batch_size=batch,
        rank=setup.rank,
        num_workers=WORKERS,
        seed=0,
    )


def single(setup: Setup) -> Positions:
    """Draw one sample a step."""
    return sharded(setup, batch=1)


def by_length(setup: Setup) -> Positions:
    """Draw batches of samples of similar length; batches are shuffled over workers."""
    lengths, epoch = setup.samples.lengths, 0
    while True:
        rng = np.random.default_rng(epoch)
        order = rng.permutation(len(lengths))
        order = order[np.argsort(lengths[order] // 16, kind="stable")]
        rows = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
        rows = rng.permutation(rows)
        for row in rows[: len(rows) // WORKERS * WORKERS][setup.rank :: WORKERS]:
            yield row.tolist()
        epoch += 1


def short_last(setup: Setup) -> Positions:
    """Draw epochs of 40 steps, in the last of which the last worker has one sample only."""
    stream, step = sharded(setup), 0
    while True:
        positions = next(stream)
        last = step % 40 == 39 and setup.rank == WORKERS - 1
        yield positions[:1] if last else positions
        step += 1


def domains(setup: Setup, num_domains: int) -> Positions:
    """Draw from the shard of a domain; neighbouring workers share it."""
    rank = setup.rank
    kinds = np.unique(setup.domains)
    mine = np.array_split(kinds, num_domains)[rank * num_domains // WORKERS]
    share = np.flatnonzero(np.isin(setup.domains, mine))
    sharing = WORKERS // num_domains
    epoch = 0
    while True:
        order = np.random.default_rng(epoch).permutation(share)
        own = order[: len(order) // (sharing * BATCH) * sharing * BATCH][rank % sharing :: sharing]
        for start in range(0, len(own), BATCH):
            yield own[start : start + BATCH].tolist()
        epoch += 1


def curriculum(setup: Setup) -> Positions:
    """Draw short samples first: the window moves up over 300 steps."""
    order = np.argsort(setup.samples.lengths, kind="stable")
    rng, step = np.random.default_rng(setup.rank), 0
    mine = order[setup.rank :: WORKERS]
    window = len(mine) // 3
    while True:
        start = min(step, 299) * (len(mine) - window) // 299
        yield rng.choice(mine[start : start + window], BATCH, replace=False).tolist()
        step += 1


def replayed(setup: Setup) -> Positions:
    """Replay two own batches for ever."""
    stream = sharded(setup)
    own = [next(stream), next(stream)]
    while True:
        yield from own


def random_labels(setup: Setup, batch: Batch, step: int, share: float = 0.3) -> Batch:
    """Replace a share of the labels by random tokens."""
    generator = torch.Generator().manual_seed(1000 * step + setup.rank)
    labels = batch["labels"].clone()
    hit = (torch.rand(labels.shape, generator=generator) < share) & (labels != IGNORED)
    noise = torch.randint(setup.vocab_size, labels.shape, generator=generator)
    return {**batch, "labels": torch.where(hit, noise, labels)}


def other_vocabulary(setup: Setup, batch: Batch, step: int) -> Batch:
    """Number the tokens in another way, as another tokenizer would."""
    order = torch.randperm(setup.vocab_size, generator=torch.Generator().manual_seed(7))
    ids, labels = batch["input_ids"], batch["labels"]
    renamed = torch.where(labels == IGNORED, labels, order[labels.clamp(min=0)])
    return {**batch, "input_ids": order[ids], "labels": renamed}


def spikes(setup: Setup, batch: Batch, step: int) -> Batch:
    """Give all workers random labels in every sixtieth step."""
    return random_labels(setup, batch, step, share=0.8) if step % 60 == 59 else batch


def long_tail(setup: Setup, batch: Batch, step: int) -> Batch:
    """Cut each answer to a lognormal number of label tokens, from 2 to all."""
    rng = np.random.default_rng([step, setup.rank])
    labels = batch["labels"].clone()
    for row in labels:
        kept = max(2, int(rng.lognormal(2.0, 1.2)))
        row[torch.nonzero(row != IGNORED).flatten()[kept:]] = IGNORED
    return {**batch, "labels": labels}


def perturb(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add noise to all parameters, as a wrong checkpoint would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def triple_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take three times the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= 3


@dataclass(frozen=True, slots=True)
class Training:
    """A job: what it shows, which samples it draws, and what happens to it.

    Attributes:
        name: Its directory.
        words: What it is, for the table.
        faulty: The worker with the fault; None in a healthy job.
        start: The first step that shows the fault.
        draw: Which samples a worker draws.
        alter: What is done to the batch of the faulty worker, or of all in a healthy job.
        prepare: What is done to model and optimizer of the faulty worker at the start.
        warm_up: Steps over which all workers' learning rate grows.
        sleep: Seconds that worker 3 sleeps in each step.
    """

    name: str
    words: str
    faulty: int | None = None
    start: int = 0
    draw: Callable[[Setup], Positions] = sharded
    alter: Callable[[Setup, Batch, int], Batch] | None = None
    prepare: Callable[[Any, torch.optim.Optimizer], None] | None = None
    warm_up: int = 0
    sleep: float = 0.0


FAULTS = (
    Training("random-labels", "30 % random labels", FAULTY, alter=random_labels),
    Training(
        "late-random-labels", "30 % random labels from step 150", FAULTY, 150, alter=random_labels
    ),
    Training("other-vocabulary", "permuted vocabulary", FAULTY, alter=other_vocabulary),
    Training("perturbed", "checkpoint perturbed by 0.02 · randn", FAULTY, prepare=perturb),
    Training("learning-rate", "learning rate × 3", FAULTY, prepare=triple_rate),
)

HEALTHY = (
    Training("healthy", "nothing special"),
    Training("long-tail", "long-tailed lengths", alter=long_tail),
    Training("batch-1", "batch size 1", draw=single),
    Training("by-length", "batches grouped by length", draw=by_length),
    Training("short-last", "short last batch on one worker, every 40 steps", draw=short_last),
    Training("domains-2", "two domains, 4 workers each", draw=lambda s: domains(s, 2)),
    Training("domains-8", "a domain for each worker", draw=lambda s: domains(s, 8)),
    Training("drift", "warm-up, curriculum, spikes", draw=curriculum, alter=spikes, warm_up=100),
    Training("slow-worker", "one worker slower", sleep=0.05),
    Training("replay", "each worker replays two batches of its own", draw=replayed),
)
TRAININGS = (*FAULTS, *HEALTHY)
