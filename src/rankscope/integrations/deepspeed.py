"""DeepSpeed: one line after ``deepspeed.initialize``.

::

    from rankscope.integrations.deepspeed import watch

    engine, optimizer, loader, _ = deepspeed.initialize(...)
    scope = watch(engine, run_dir="runs/sft")
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rankscope
from rankscope.errors import UsageError
from rankscope.integrations.label_tokens import LabelTokens, Weigh
from rankscope.private import Patch
from rankscope.wrappers.deepspeed import is_deepspeed
from rankscope.wrappers.labels import count_label_tokens, shifts_labels
from rankscope.wrappers.surroundings import outside

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope.session.scope import Scope


def watch(
    engine: Any, *, run_dir: str | Path, weight: Weigh | None = None, **options: Any
) -> "Scope":
    """Watch a DeepSpeed engine, with the loss that its ``backward`` is given.

    The loss is taken from ``engine.backward(loss)``, before the engine divides it by the
    accumulation steps, unless the model's output has a ``.loss`` through which the backward pass
    goes. ZeRO stage, accumulation steps, precision and batch size are stored with the run.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        run_dir: As in :func:`rankscope.watch`.
        weight: Takes the engine's arguments, and returns the number of label tokens behind the
            loss. None: those of an argument named ``labels``, if there is one.
        options: Further options of :func:`rankscope.watch`.

    Returns:
        The running scope.

    Raises:
        UsageError: The engine is none, or an option cannot work.
        UnsupportedError: The engine works in a way that cannot be watched.
    """
    if not is_deepspeed(engine):
        raise UsageError(
            "rankscope.integrations.deepspeed.watch() expected the engine that "
            f"deepspeed.initialize returned, got {type(engine).__name__}; give it that, or call "
            "rankscope.watch"
        )
    config = {**_facts(engine), **(options.pop("config", None) or {})}
    options.setdefault("loader", engine.training_dataloader)
    scope = rankscope.watch(engine, run_dir=run_dir, config=config, **options)
    _Losses(engine, scope, LabelTokens(weight))
    return scope


class _Losses:
    """Gives a scope the loss of every ``engine.backward``, until the scope is closed."""

    def __init__(self, engine: Any, scope: "Scope", label_tokens: LabelTokens) -> None:
        self._scope = scope
        self._label_tokens = label_tokens
        self._shifted = shifts_labels(engine.module)
        self._weight: Tensor | float | None = None
        before = engine.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        scope.until_closed(before)
        scope.until_closed(Patch(engine, "backward", partial(partial, self._give_and_run)))

    def _before_forward(self, engine: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if engine.training:
            outside(self._weigh, args, kwargs)

    def _weigh(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self._label_tokens.known:
            self._weight = self._label_tokens(*args, **kwargs)
        else:
            self._weight = count_label_tokens(kwargs, shifted=self._shifted)

    def _give_and_run(
        self, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._scope.loss(loss, self._weight, spare=True)
        return backward(loss, *args, **kwargs)


def _facts(engine: Any) -> dict[str, Any]:
    precisions = {"bf16": engine.bfloat16_enabled(), "fp16": engine.fp16_enabled()}
    named = [name for name, enabled in precisions.items() if enabled]
    return {
        "framework": "deepspeed",
        "zero_stage": int(engine.zero_optimization_stage()),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "micro_batch_size": int(engine.train_micro_batch_size_per_gpu()),
        "gradient_clipping": float(engine.gradient_clipping()),
        "precision": named[0] if named else "fp32",
    }
