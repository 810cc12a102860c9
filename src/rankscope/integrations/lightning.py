"""Lightning: a callback that watches ``Trainer.fit``.

::

    from rankscope.integrations.lightning import RankscopeCallback

    trainer = Trainer(callbacks=[RankscopeCallback(run_dir="runs/sft")], ...)

It works with ``lightning.pytorch`` and with ``pytorch_lightning``, whichever is imported first.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rankscope.errors import MissingExtraError, UnsupportedError, UsageError, lacks
from rankscope.integrations.label_tokens import LabelTokens, Weigh
from rankscope.private import Patch
from rankscope.session.start import watch
from rankscope.wrappers.surroundings import outside

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from rankscope.session.scope import Scope
else:
    try:
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            try:
                from lightning.pytorch import Callback
            except ImportError as error:
                if not lacks(error, "lightning"):
                    raise
                from pytorch_lightning import Callback
    except ImportError as error:
        if not lacks(error, "lightning", "pytorch_lightning"):
            raise
        raise MissingExtraError("rankscope.integrations.lightning", "lightning") from error


_BY_COMMAND = "leave the callback out, and put rankscope run before the script, which watches it"


class LightningCallback(Callback):
    """Watches every worker of a ``Trainer.fit``, from ``on_train_start`` to its end.

    The loss of a micro-batch is the result of ``training_step``, before Lightning divides it by
    ``accumulate_grad_batches``; under manual optimization, the argument of ``manual_backward``.
    Validation, testing and prediction are not recorded, nor is the sanity check.

    Args:
        run_dir: As in :func:`rankscope.watch`.
        weight: Returns the number of label tokens behind a batch's loss, or one number per sample
            if ``training_step`` returns one loss per sample. None: the workers' losses count alike.
        options: Further options of :func:`rankscope.watch`.

    Attributes:
        scope: The running scope; None before training begins.

    Raises:
        UsageError: Training begins with more than one optimizer.
        UnsupportedError: The strategy cannot be watched: one worker alone, FSDP1,
            ``ModelParallelStrategy``, or see :func:`rankscope.watch`.
    """

    def __init__(self, run_dir: str | Path, *, weight: Weigh | None = None, **options: Any) -> None:
        self.scope: Scope | None = None
        self._run_dir = run_dir
        self._label_tokens = LabelTokens(weight)
        self._options = options
        self._batch: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch: only now is the model wrapped."""
        if trainer.strategy.model is pl_module:
            raise UnsupportedError(
                "RankscopeCallback expected a strategy that wraps the module for several workers, "
                f"such as 'ddp', got {type(trainer.strategy).__name__}, whose steps go past the "
                f"module's forward pass; train with strategy='ddp', or {_BY_COMMAND}"
            )
        optimizers = trainer.optimizers
        if len(optimizers) != 1:
            raise UsageError(
                f"RankscopeCallback expected one optimizer, got {len(optimizers)}: with several, "
                "which backward pass belongs to which step is unknown here; watch a training "
                f"with one, or {_BY_COMMAND}"
            )
        config = {
            "framework": "lightning",
            "strategy": type(trainer.strategy).__name__,
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            **(self._options.get("config") or {}),
        }
        loader = trainer.train_dataloader
        options: dict[str, Any] = {"loader": loader if hasattr(loader, "worker_init_fn") else None}
        options |= {**self._options, "config": config}
        self.scope = watch(trainer.strategy.model, optimizers[0], run_dir=self._run_dir, **options)
        name = "training_step"
        around = cast("Callable[..., Any]", self._train)
        if not pl_module.automatic_optimization:  # its own hook sees the scaled loss
            name = "backward"
            around = self._pass_back
        self.scope.until_closed(Patch(trainer.strategy, name, partial(partial, around)))

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch, whose label tokens may be counted."""
        self._batch = batch if self._label_tokens.known else None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish the run."""
        self._batch = None
        if self.scope is not None:
            self.scope.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the run as an incomplete one."""
        self._batch = None
        if self.scope is not None:
            self.scope.__exit__(type(exception), exception, exception.__traceback__)

    def _train(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            self._give(loss)
        return output

    def _pass_back(
        self, backward: Callable[..., Any], closure_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._give(closure_loss)
        return backward(closure_loss, *args, **kwargs)

    def _give(self, loss: Tensor) -> None:
        scope = self.scope
        if scope is not None:
            outside(lambda: scope.loss(loss, self._label_tokens(self._batch)))


RankscopeCallback = LightningCallback
"""The callback, by the name that trainings import."""
