"""Accelerate: one line after ``accelerator.prepare``.

::

    from rankscope.integrations.accelerate import watch

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scope = watch(accelerator, model, optimizer, loader=loader, run_dir="runs/sft")

The factors of ``accelerator.backward`` on a loss (the accumulation divisor, a gradient scaler) are
read where the backward pass begins. ``accelerator.end_training()`` closes the scope; the run is
incomplete if an exception is being handled then.
"""

from functools import partial
from typing import Any

from rankscope.errors import MissingExtraError, UnsupportedError, UsageError, lacks
from rankscope.integrations.hooks import closing_first
from rankscope.private import Patch
from rankscope.session import start
from rankscope.session.scope import Scope

try:
    import accelerate as hf_accelerate  # type: ignore[import-untyped]
except ImportError as error:
    if not lacks(error, "accelerate"):
        raise
    raise MissingExtraError("rankscope.integrations.accelerate", "accelerate") from error


def watch(accelerator: Any, model: Any, optimizer: Any = None, **options: Any) -> Scope:
    """Watch a training with Accelerate from now on; every process calls it, after ``prepare``.

    Args:
        accelerator: The ``accelerate.Accelerator``. Its ``end_training()`` closes the scope before
            it ends the process group, as incomplete while an exception is handled (``finally:``);
            ``scope.close()`` does so earlier.
        model: What ``accelerator.prepare`` returned: DDP, FSDP2 or DeepSpeed, compiled or not.
        optimizer: What ``accelerator.prepare`` returned for the optimizer; None where it has none.
        **options: Of :func:`rankscope.watch`, ``run_dir`` first of all. A ``config`` is recorded
            beside the accelerator's settings.

    Returns:
        The running scope, also a context manager.

    Raises:
        UsageError: ``accelerator`` is none, or an option cannot work.
        UnsupportedError: There is a single process, or the model cannot be watched.
        RunError: Rank 0 cannot write ``run_dir``.
    """
    if not isinstance(accelerator, hf_accelerate.Accelerator):
        raise UsageError(
            "watch() expected an accelerate.Accelerator as its first argument, got "
            f"{type(accelerator).__name__}; rankscope.watch(model, optimizer, …) needs none"
        )
    if accelerator.num_processes == 1:
        raise UnsupportedError(
            "watch() compares workers, and this job has one process; start several with "
            "accelerate launch --num_processes N, or leave the line out"
        )
    config = {
        "accelerate": hf_accelerate.__version__,
        "distributed_type": str(accelerator.distributed_type.value),
        "mixed_precision": str(accelerator.mixed_precision),
        "gradient_accumulation_steps": int(accelerator.gradient_accumulation_steps),
        **(options.pop("config", None) or {}),
    }
    scope = start.watch(model, optimizer, config=config, **options)
    scope.until_closed(Patch(accelerator, "end_training", partial(closing_first, scope)))
    return scope
