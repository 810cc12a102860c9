"""Training loops of torchtitan's shape: one line after the trainer has been made.

::

    from rankscope.integrations.torchtitan import watch

    trainer = Trainer(config)
    watch(trainer, run_dir="runs/pretraining")
    trainer.train()

The shape: ``trainer.model_parts`` is a list of modules under ``fully_shard``,
``trainer.optimizers.optimizers`` a list of torch optimizers, ``trainer.loss_fn(pred, labels)``
returns the sum over label tokens, which ``trainer.forward_backward_step(..., global_valid_tokens)``
divides by the number of tokens of all workers and micro-batches, and ``trainer.close()`` ends it.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import rankscope
from rankscope.errors import UnsupportedError, UsageError
from rankscope.integrations.hooks import closing_first
from rankscope.private import Patch
from rankscope.stats.tokens import IGNORED_LABEL
from rankscope.wrappers.surroundings import outside

if TYPE_CHECKING:
    from rankscope.session.scope import Scope

_SIZES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


def watch(trainer: Any, *, run_dir: str | Path, **options: Any) -> "Scope":
    """Watch a trainer of torchtitan's shape until ``trainer.close()``.

    A worker's recorded loss is its mean over its own label tokens, weighted by their number. A run
    whose ``trainer.close()`` is called while an exception is handled is incomplete.

    Args:
        trainer: The trainer, after its model and optimizers have been made, before training.
        run_dir: As in :func:`rankscope.watch`.
        options: Further options of :func:`rankscope.watch`.

    Returns:
        The running scope.

    Raises:
        UsageError: The trainer has another shape.
        UnsupportedError: Its model cannot be watched, or this rank holds several parts of it.
    """
    for problem in _problems(trainer):
        raise UsageError(
            "rankscope.integrations.torchtitan.watch() expected a trainer of torchtitan's shape, "
            f"got {type(trainer).__name__} {problem}; call rankscope.watch with its model and "
            "optimizer, and scope.loss in its loop"
        )
    if len(trainer.model_parts) != 1:
        raise UnsupportedError(
            f"watch() expected one model part on each rank, got {len(trainer.model_parts)}, as in "
            "an interleaved pipeline schedule; call rankscope.watch with each part and its "
            "optimizer, and a run_dir of its own"
        )
    optimizers = list(trainer.optimizers.optimizers)
    config = {**_facts(trainer), **(options.pop("config", None) or {})}
    [model] = trainer.model_parts
    scope = rankscope.watch(model, optimizers, run_dir=run_dir, config=config, **options)
    schedule = getattr(trainer, "pp_schedule", None)  # it has a loss function of its own
    calls = (trainer, "loss_fn") if schedule is None else (schedule, "_loss_fn")
    scope.until_closed(
        Patch(*calls, lambda loss_fn: _Losses(loss_fn, scope)),
        Patch(trainer, "close", partial(closing_first, scope)),
    )
    return scope


class _Losses:
    """A loss function, a sum over label tokens, that also gives a scope each loss per token."""

    def __init__(self, loss_fn: Callable[..., torch.Tensor], scope: "Scope") -> None:
        self._loss_fn = loss_fn
        self._scope = scope

    def __call__(self, pred: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the loss function."""
        total = self._loss_fn(pred, labels, *args, **kwargs)
        if torch.is_grad_enabled():
            outside(self._give, total, labels)
        return total

    def _give(self, total: torch.Tensor, labels: torch.Tensor) -> None:
        tokens = (labels != IGNORED_LABEL).sum()
        self._scope.loss(total.detach(), tokens, factor=tokens)


def _problems(trainer: Any) -> Iterator[str]:
    for name in ("model_parts", "optimizers", "loss_fn", "forward_backward_step", "close"):
        if not hasattr(trainer, name):
            yield f"without {name}"
            return
    if not hasattr(trainer.optimizers, "optimizers"):
        yield "whose optimizers are no container with a list of optimizers"
    names = inspect.signature(trainer.forward_backward_step).parameters
    if "global_valid_tokens" not in names:
        yield "whose forward_backward_step takes no global_valid_tokens"


def _facts(trainer: Any) -> dict[str, Any]:
    sizes = getattr(trainer, "parallel_dims", None)
    facts = {name: getattr(sizes, name, None) for name in _SIZES}
    facts["gradient_accumulation_steps"] = getattr(trainer, "gradient_accumulation_steps", None)
    known = {name: value for name, value in facts.items() if isinstance(value, int)}
    return {"framework": "torchtitan's shape", **known}
