"""Local gradients of the built-in model on its built-in data, one for each of W workers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from rankscope.errors import UsageError
from rankscope.numerics.gradients import LocalGradients
from rankscope.study.base import BASE_STEPS
from rankscope.study.config import MAX_SEED, Combination, Reading, Setting, StudyConfig
from rankscope.study.data import load_records
from rankscope.study.encoding import EncodedSet, draw_batches, encode
from rankscope.study.models import load_model

MAX_STEP = 10_000


def record_gradients(
    num_workers: int,
    *,
    step: int = 0,
    seed: int = 0,
    batch_size: int = 0,
    base_steps: int = BASE_STEPS,
    progress: Callable[[str, int, int], None] | None = None,
) -> LocalGradients:
    """Fine-tune the built-in model and return the workers' gradients of one step.

    The workers are computed one after the other in this process. Each draws batches from its own
    shard, as in a study with the sharded reading, and steps are taken with the study's optimizer
    on the mean of their gradients.

    Args:
        num_workers: W, at least 2.
        step: Steps to take before; 0 records the base model's gradients.
        seed: Decides data, base model and batches.
        batch_size: Samples per worker; 0 for the study's own.
        base_steps: Steps of the base model's training.
        progress: Called with what is being done, how many parts are done, and how many there are.

    Returns:
        Gradients by parameter name, float32 ``[W, n]``.

    Raises:
        UsageError: There are too few workers, or the step cannot be.
        MissingExtraError: ``transformers`` is not installed.
    """
    if num_workers < 2:
        raise UsageError(f"expected at least 2 workers, got {num_workers}")
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"expected a step from 0 to {MAX_STEP}, got {step}")
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"expected a seed from 0 to {MAX_SEED}, got {seed}")
    tell = progress or (lambda what, done, total: None)
    total = (step + 1) * num_workers
    tell("base model", 0, total)
    config = StudyConfig(seed=seed)
    records = load_records(None, seed=seed)
    loaded = load_model(
        "tiny", seed=seed, tokenizer_records=records.held_out, base_steps=base_steps
    )
    samples = encode(records.records, loaded.tokenizer, config.max_length)
    workers = [
        draw_batches(
            Combination(Reading.SHARDED, Setting.S1_1),
            num_samples=len(samples),
            batch_size=batch_size or config.batch_size,
            rank=rank,
            num_workers=num_workers,
            seed=seed,
        )
        for rank in range(num_workers)
    ]
    model = loaded.model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.effective_learning_rate, weight_decay=0.0
    )
    for done in range(step):
        for rank, batches in enumerate(workers):
            tell(f"gradients of step {done}", done * num_workers + rank, total)
            _backward(model, samples, batches, num_workers)
        optimizer.step()
        optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    arrays = {
        name: np.empty((num_workers, parameter.numel()), dtype=np.float32)
        for name, parameter in parameters.items()
    }
    for rank, batches in enumerate(workers):
        tell(f"gradients of step {step}", step * num_workers + rank, total)
        _backward(model, samples, batches)
        for name, parameter in parameters.items():
            assert parameter.grad is not None, name
            arrays[name][rank] = parameter.grad.flatten().numpy()
        optimizer.zero_grad()
    tell(f"gradients of step {step}", total, total)
    return LocalGradients("recorded", f"built-in model, step {step}", arrays)


def _backward(
    model: nn.Module, samples: EncodedSet, batches: Iterator[list[int]], divisor: int = 1
) -> None:
    """Add the gradient of one worker's next batch to the parameters' gradients."""
    inputs, _ = samples.collate(next(batches))
    loss: Any = model(**inputs).loss
    (loss / divisor).backward()
