"""One training of a study, as it runs on every worker."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.core.step import StepReport
from rankscope.study.config import Combination, Precision, StudyConfig
from rankscope.study.encoding import IGNORED, EncodedSet
from rankscope.study.models import LoadedModel
from rankscope.study.quiet import quiet_transformers, save_checkpoint
from rankscope.study.sampling import draw_batches

FLUSH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """What every training of a study shares on one worker.

    Attributes:
        config: The study's options.
        output: The study's directory.
        samples: Encoded samples.
        load: Loads a fresh copy of the base model, and its tokenizer.
        device: Where this worker computes.
        facts: What ``run.json`` says of model and data.
    """

    config: StudyConfig
    output: Path
    samples: EncodedSet
    load: Callable[[], LoadedModel]
    device: torch.device
    facts: dict[str, Any]


def train(job: Job, combination: Combination, on_step: Callable[[StepReport | None], None]) -> None:
    """Fine-tune under one combination, watched, and save the model.

    Args:
        job: What all trainings share.
        combination: The reading and setting to train under.
        on_step: Called after each step, on every worker, with the last gathered report.
    """
    config, rank = job.config, dist.get_rank()
    _seed_everything(combination.setting.seed_of(rank, config.seed))
    loaded = job.load()
    model = loaded.model.to(job.device)
    _seed_everything(combination.setting.seed_of(rank, config.seed))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        ddp.parameters(), lr=config.effective_learning_rate, weight_decay=0.0
    )
    batches = draw_batches(
        combination,
        num_samples=len(job.samples),
        batch_size=config.batch_size,
        rank=rank,
        num_workers=dist.get_world_size(),
        seed=config.seed,
    )
    run_dir = job.output / "runs" / combination.name
    run_facts = {
        "reading": combination.reading,
        "setting": combination.setting,
        "study": config.to_json(),
        **job.facts,
    }
    with rankscope.watch(
        ddp,
        optimizer,
        run_dir=run_dir,
        overhead_budget=None,  # a study wants every step, whatever it costs
        seed=config.seed,
        config=run_facts,
        plan={"loss_weighting": "worker"},  # each worker's mean counts alike, as in the paper
        flush_seconds=FLUSH_SECONDS,
    ) as scope:
        for _ in range(config.steps):
            _train_step(job, ddp, optimizer, batches, scope)
            on_step(scope.latest)
        if config.saves(combination):
            _save(loaded, job.output / "models" / combination.name)


def _train_step(
    job: Job,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[list[int]],
    scope: rankscope.Scope,
) -> None:
    accumulation = job.config.accumulation
    for micro in range(accumulation):
        batch, record_ids = job.samples.collate(next(batches))
        scope.batch(record_ids)
        last = micro == accumulation - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            losses, tokens = _losses_per_sample(job, ddp, batch)
            scope.loss(losses, weight=tokens)
            loss = (losses * tokens).sum() / tokens.sum()
            (loss / accumulation).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _losses_per_sample(
    job: Job, ddp: DistributedDataParallel, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the mean loss per label token of each sample ``[B]``, and its label tokens ``[B]``."""
    batch = {name: tensor.to(job.device, non_blocking=True) for name, tensor in batch.items()}
    with autocast(job.config.precision, job.device):
        logits = ddp(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    present = targets != IGNORED
    token_losses = F.cross_entropy(
        logits[:, :-1][present].float(), targets[present], reduction="none"
    )
    spread = torch.zeros(present.shape, device=job.device).masked_scatter(present, token_losses)
    tokens = present.sum(1)
    return spread.sum(1) / tokens, tokens


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the mixed-precision context of a precision on a device."""
    on = precision is Precision.BF16 or (precision is Precision.AUTO and device.type != "cpu")
    return torch.autocast(device.type, torch.bfloat16, enabled=on)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what training scripts use
    torch.manual_seed(seed)


def _save(loaded: LoadedModel, path: Path) -> None:
    """Save a Hugging Face checkpoint on rank 0, whole or not at all."""
    if dist.get_rank() == 0:
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        with quiet_transformers():
            save_checkpoint(loaded.model, loaded.tokenizer, partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    dist.barrier()
