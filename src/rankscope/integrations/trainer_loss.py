"""The loss of a Transformers trainer, from what its ``compute_loss`` returns."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rankscope.capture.labels import count_label_tokens
from rankscope.capture.loss import shifts_labels
from rankscope.capture.loss_form import LossForm, read_form
from rankscope.session.scope import Scope

_log = logging.getLogger("rankscope")


class TrainerLoss:
    """Gives the scope the loss that ``compute_loss`` returns, in units of one label token.

    It counts only where backward does not pass through the loss in the model's own output. Where
    the trainer says that ``compute_loss`` scales it for gradient accumulation already, as TRL's
    GRPO does, one over the number of micro-batches is taken out of it.

    Args:
        trainer: The trainer.
        scope: What takes the loss.
    """

    def __init__(self, trainer: Any, scope: Scope) -> None:
        self._trainer = trainer
        self._scope = scope
        self._num_workers = trainer.accelerator.num_processes
        self._shifted = shifts_labels(trainer.accelerator.unwrap_model(trainer.model))
        self._form: LossForm | None = None
        self._read = False

    def around(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compute_loss`` with a look at what it returns; it returns the same."""

        @functools.wraps(compute_loss)
        def observed(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training or not torch.is_grad_enabled():
                return compute_loss(model, inputs, *args, **kwargs)
            named = dict(inputs) if isinstance(inputs, Mapping) else {}  # labels are popped
            result = compute_loss(model, inputs, *args, **kwargs)
            num_items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
            self._give(result[0] if isinstance(result, tuple) else result, named, num_items)
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
        share = 1 / self._accumulated() if self._is_scaled() else None
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

    def _is_scaled(self) -> bool:
        """Return whether the trainer does not divide the loss by the number of micro-batches."""
        return getattr(self._trainer, "loss_is_scaled_for_ga", None) is True

    def _accumulated(self) -> int:
        """Return the number of micro-batches of this step."""
        usual = self._trainer.args.gradient_accumulation_steps
        return max(int(getattr(self._trainer, "current_gradient_accumulation_steps", usual)), 1)
