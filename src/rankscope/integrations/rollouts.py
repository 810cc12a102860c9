"""The gap between trainer and rollout where TRL's ``GRPOTrainer`` has both at hand.

The inputs of its loss hold the rollout engine's log-probabilities of the tokens that it drew: vLLM,
or a ``rollout_func``. The trainer's own are there as well, or are the first thing that the loss
computes. Nothing is computed twice, and no rank waits for another.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankscope.private import Patch, callers

if TYPE_CHECKING:
    from rankscope.session.scope import Scope

_log = logging.getLogger("rankscope")

_ROLLOUT = "sampling_per_token_logps"
_TRAINER = "old_per_token_logps"
_MASKS = ("completion_mask", "tool_mask")
_COMPUTES = "_get_per_token_logps_and_entropies"


class TrainerRollouts:
    """Gives a scope the log-probabilities in the inputs of ``compute_loss``.

    A batch of rollouts counts once, when it is first trained on: later the policy has moved.
    """

    def __init__(self, trainer: Any, scope: "Scope") -> None:
        self._trainer = trainer
        self._scope = scope
        self._seen: list[weakref.ref[Tensor]] = []

    def around(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compute_loss`` with a look at its inputs; it returns the same."""

        @functools.wraps(compute_loss)
        def observed(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rollout = inputs.get(_ROLLOUT) if isinstance(inputs, Mapping) else None
            trains = rollout is not None and model.training and torch.is_grad_enabled()
            if not trains or not self._is_new(rollout):
                return compute_loss(model, inputs, *args, **kwargs)
            named = dict(inputs)
            if named.get(_TRAINER) is not None or not hasattr(self._trainer, _COMPUTES):
                result = compute_loss(model, inputs, *args, **kwargs)
            else:
                with Patch(self._trainer, _COMPUTES, functools.partial(_keeping, named)):
                    result = compute_loss(model, inputs, *args, **kwargs)
            self._give(named)
            return result

        return observed

    def _is_new(self, rollout: Any) -> bool:
        """Return whether a batch of rollouts is trained on for the first time, and note it."""
        if not isinstance(rollout, Tensor):
            return False
        self._seen = [each for each in self._seen if each() is not None]
        if any(each() is rollout for each in self._seen):
            return False
        self._seen.append(weakref.ref(rollout))
        return True

    def _give(self, named: Mapping[str, Any]) -> None:
        if named.get(_TRAINER) is None:
            return
        try:
            masks = [named[name] for name in _MASKS if named.get(name) is not None]
            mask = functools.reduce(torch.mul, masks) if masks else None
            self._scope.rollout(named[_TRAINER], named[_ROLLOUT], mask)
        except Exception:
            _log.debug("rollouts of the trainer could not be read", exc_info=True)


def _keeping(named: dict[str, Any], computes: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that keeps the log-probabilities that it first returns."""

    @functools.wraps(computes)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        result = computes(*args, **kwargs)
        if named.get(_TRAINER) is None:
            logps = result[0] if isinstance(result, tuple) and result else result
            named[_TRAINER] = logps.detach() if isinstance(logps, Tensor) else None
        return result

    return keeping


def follow_calling_trainer(scope: "Scope") -> None:
    """Give a scope the rollouts of the trainer that calls the model, if it has any."""
    for frame in callers():
        trainer = frame.f_locals.get("self")
        if hasattr(type(trainer), _COMPUTES) and hasattr(type(trainer), "compute_loss"):
            around = TrainerRollouts(trainer, scope).around
            scope.until_closed(Patch(trainer, "compute_loss", around))
            return
