"""Transformers: a callback for ``Trainer``, and for those that inherit from it, as TRL's do.

::

    from rankscope.integrations.transformers import RankscopeCallback

    trainer = Trainer(..., callbacks=[RankscopeCallback(run_dir="runs/sft")])

The callback watches from ``on_train_begin`` to ``on_train_end``. A loss that the trainer computes
outside of the model (TRL, ``compute_loss_func``, label smoothing) is taken from ``compute_loss``,
and so are the log-probabilities of rollouts.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankscope.errors import MissingExtraError, UnsupportedError, lacks
from rankscope.integrations.rollouts import TrainerRollouts
from rankscope.private import Patch, callers
from rankscope.session import start
from rankscope.wrappers.labels import count_label_tokens, shifts_labels
from rankscope.wrappers.loss_form import LossForm, read_form
from rankscope.wrappers.surroundings import outside

if TYPE_CHECKING:
    from rankscope.session.scope import Scope

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    if not lacks(error, "transformers"):
        raise
    raise MissingExtraError("rankscope.integrations.transformers", "transformers") from error

_log = logging.getLogger("rankscope")

_ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay"),
    *("max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_train_epochs", "max_steps", "seed", "data_seed", "bf16", "fp16", "torch_compile"),
    *("average_tokens_across_devices", "label_smoothing_factor", "ignore_data_skip"),
    *("train_sampling_strategy", "packing", "assistant_only_loss", "loss_type"),
)
_WHOLE = ("_run_epoch", "_finalize_training", "evaluate")
_PARTS = ("get_batch_samples", "training_step", "evaluate")  # of a Trainer without the former


class TransformersCallback(TrainerCallback):
    """Watches the training of a ``Trainer``; each process makes one, with equal options.

    Args:
        run_dir: Directory that rank 0 writes, see :func:`rankscope.watch`. A second ``train()``,
            or a resumed one, goes on in a numbered sibling.
        **options: Of :func:`rankscope.watch`. ``loader``, ``tokenizer`` and ``config`` are taken
            from the trainer unless they are given; a ``config`` is recorded beside its arguments.
    """

    def __init__(self, run_dir: str | Path, **options: Any) -> None:
        self._options = {"run_dir": run_dir, **options}
        self.scope: Scope | None = None
        """The running scope; None outside of a training, and in a single process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch; :func:`rankscope.watch` raises before the first step."""
        self._close(RuntimeError("a training ended without on_train_end"))
        trainer = _calling_trainer()
        if trainer.accelerator.num_processes == 1:
            _log.warning("rankscope compares workers; this training has one, and is not watched")
            return
        processing = kwargs.get("processing_class")
        tokenizer = getattr(processing, "tokenizer", processing)
        options = {
            "loader": kwargs.get("train_dataloader"),
            "tokenizer": tokenizer if hasattr(tokenizer, "get_vocab") else None,
            **self._options,
        }
        options["config"] = {**_arguments(args), **(self._options.get("config") or {})}
        self.scope = start.watch(trainer.model_wrapped, trainer.optimizer, **options)
        loss = TrainerLoss(trainer, self.scope)
        rollouts = TrainerRollouts(trainer, self.scope)
        names = _WHOLE if hasattr(trainer, "_run_epoch") else _PARTS
        self.scope.until_closed(
            Patch(trainer, "compute_loss", lambda method: loss.around(rollouts.around(method))),
            *(Patch(trainer, name, self._around) for name in names if hasattr(trainer, name)),
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver the last measurements, and finish the run."""
        self._close()

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that closes the run as incomplete when it raises."""

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except BaseException as error:
                self._close(error)
                raise

        return guarded

    def _close(self, error: BaseException | None = None) -> None:
        scope, self.scope = self.scope, None
        if scope is not None:
            scope.__exit__(None if error is None else type(error), error, None)


RankscopeCallback = TransformersCallback
"""The callback, by the name that trainings import."""


class TrainerLoss:
    """Gives the scope the loss that ``compute_loss`` returns, in units of one label token.

    It counts only where backward does not pass through the loss in the model's own output. Where
    the trainer's flag shows that ``compute_loss`` scales it for gradient accumulation already, as
    TRL's GRPO does, one over the number of micro-batches is taken out of it.
    """

    def __init__(self, trainer: Any, scope: "Scope") -> None:
        self._trainer = trainer
        self._scope = scope
        self._num_workers = trainer.accelerator.num_processes
        self._shifted = shifts_labels(trainer.accelerator.unwrap_model(trainer.model))
        self._form: LossForm | None = None
        self._read = False

    def around(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compute_loss`` with a look at its result, which stays the same."""

        @functools.wraps(compute_loss)
        def observed(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training or not torch.is_grad_enabled():
                return compute_loss(model, inputs, *args, **kwargs)
            named = dict(inputs) if isinstance(inputs, Mapping) else {}  # labels are popped
            result = compute_loss(model, inputs, *args, **kwargs)
            num_items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
            loss = result[0] if isinstance(result, tuple) else result
            outside(self._give, loss, named, num_items)
            return result

        return observed

    def _give(self, loss: Any, inputs: Mapping[str, Any], num_items: Any) -> None:
        try:
            weight, factor = self._weight_and_factor(loss, inputs, num_items)
            constant = None if self._form is not None else math.nan
            self._scope.loss(loss, weight, factor=factor, constant=constant, spare=True)
        except Exception:
            _log.debug("a loss of the trainer could not be read", exc_info=True)

    def _weight_and_factor(self, loss: Any, inputs: Mapping[str, Any], num_items: Any) -> Any:
        own = count_label_tokens(inputs, shifted=self._shifted)
        is_scaled = getattr(self._trainer, "loss_is_scaled_for_ga", None) is True
        share = 1 / self._accumulated() if is_scaled else None
        if own is None or num_items is None or torch.as_tensor(num_items).numel() != 1:
            return own, share
        if not self._read:
            self._read = True
            self._form = read_form(loss, own, num_items, self._num_workers)
        if self._form is None:
            return None, share
        factor = self._form.factor(own, num_items, self._num_workers)
        if share is not None and not self._form.divided_by_all:
            factor = factor * share
        return own, factor

    def _accumulated(self) -> int:
        """Return the number of micro-batches of this step."""
        usual = self._trainer.args.gradient_accumulation_steps
        return max(int(getattr(self._trainer, "current_gradient_accumulation_steps", usual)), 1)


def _calling_trainer() -> Any:
    """Return the trainer that calls the callback: its handler passes the bare model only."""
    for frame in callers():
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
    raise UnsupportedError(
        "RankscopeCallback expected to be called by a transformers.Trainer; in a loop of your own "
        "call rankscope.watch(model, optimizer, run_dir=…)"
    )


def _arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that decide what a training computes, as JSON values."""
    values = {name: getattr(args, name, None) for name in _ARGUMENTS}
    plain = (bool, int, float, str)
    return {
        name: value if type(value) in plain else str(getattr(value, "value", value))
        for name, value in values.items()
        if value is not None
    }
