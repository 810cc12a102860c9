"""Ray Train: one line in the training function of a ``TorchTrainer``.

::

    from rankscope.integrations.ray import watch

    def train_loop_per_worker(config):
        model = ray.train.torch.prepare_model(make_model())
        optimizer = torch.optim.AdamW(model.parameters())
        watch(model, optimizer)
        ...
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import rankscope
from rankscope.errors import MissingExtraError, UsageError
from rankscope.private import Patch

if TYPE_CHECKING:
    from rankscope.session.scope import Scope

_log = logging.getLogger("rankscope")

HIDDEN_SECONDS = 1.0
"""An error is hidden so long while the training function runs: its own ends it at once."""


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run_dir: str | Path | None = None,
    **options: Any,
) -> "Scope":
    """Watch a worker of a Ray Train run until its training function ends.

    Every worker calls it, after ``ray.train.torch.prepare_model``. The run is closed when the
    function returns (also without ``scope.close()``), and as an incomplete one when it raises. Ray
    waits for that, ten seconds at most, before it takes the process group down.

    Args:
        model: What ``prepare_model`` returned.
        optimizer: Its optimizer.
        run_dir: As in :func:`rankscope.watch`; by default ``rankscope`` in the directory of the
            experiment, where its checkpoints are: ``storage_path/name/rankscope``.
        options: Further options of :func:`rankscope.watch`.

    Returns:
        The running scope.

    Raises:
        MissingExtraError: Ray Train is not installed.
        UsageError: It is not called by a worker of Ray Train; or, without ``run_dir``, the results
            of the experiment are not stored on a file system that is mounted.
        UnsupportedError: The model cannot be watched, see :func:`rankscope.watch`.
    """
    context = _context()
    path = _default_directory(context) if run_dir is None else Path(run_dir)
    facts = {"framework": "ray", "experiment": context.get_experiment_name()}
    config = {**facts, **(options.pop("config", None) or {})}
    scope = rankscope.watch(model, optimizer, run_dir=path, config=config, **options)
    _close_at_the_end(scope, next(model.parameters()).device)
    return scope


def _context() -> Any:
    """Return Ray Train's context of this worker; UsageError if this is none."""
    try:
        import ray.train
    except ImportError as error:
        raise MissingExtraError("rankscope.integrations.ray", "ray") from error
    try:
        context = ray.train.get_context()
        context.get_world_rank()
    except Exception as error:
        raise UsageError(
            "rankscope.integrations.ray.watch() expected to be called inside the training function "
            f"of a Ray Train worker ({type(error).__name__}: {error}); call it there"
        ) from error
    return context


def _default_directory(context: Any) -> Path:
    """Return a directory beside the checkpoints of this worker's experiment."""
    import pyarrow.fs

    storage = context.get_storage()
    file_system = storage.storage_filesystem
    directory = storage.experiment_fs_path
    if not isinstance(file_system, pyarrow.fs.LocalFileSystem):
        raise UsageError(
            "a run is written as files on local or mounted storage, and the storage_path of this "
            f"Ray Train run is on {file_system.type_name} ({directory}); give watch() a run_dir "
            "that worker 0 can write, or an address such as s3://bucket/runs/sft"
        )
    return Path(directory) / "rankscope"


def _close_at_the_end(scope: "Scope", device: torch.device) -> None:
    """Close the scope when the thread that runs the training function has ended.

    Ray takes all workers down once one of them has an error, and the process group once their
    threads are over; so both are hidden from it until the run is written. It does see an error of
    another thread (Ray's own, that uploads a checkpoint) while the training goes on.
    """
    training = threading.current_thread()
    runner = _runner()
    closed = threading.Event()
    patches: list[Patch] = []

    def wait_and_close() -> None:
        training.join()
        try:
            # Past the attribute, which is silent while another scope of this worker closes.
            error = None if runner is None else type(runner).get_error(runner)
            with _on(device):
                if error is None:
                    scope.close()
                else:
                    scope.__exit__(type(error), error, None)
        except Exception:
            _log.exception("rankscope could not close its run")
        finally:
            closed.set()
            for patch in patches:
                patch.remove()

    if runner is not None:
        patches += [
            Patch(runner, "is_running", lambda runs: lambda: runs() or not closed.is_set()),
            Patch(runner, "get_error", partial(_hidden, runner, training, closed)),
        ]
    threading.Thread(target=wait_and_close, name="rankscope-closing", daemon=True).start()


def _hidden(
    runner: Any,
    training: threading.Thread,
    closed: threading.Event,
    get_error: Callable[[], BaseException | None],
) -> Callable[[], BaseException | None]:
    """Return a ``get_error`` that hides a training function's error until its run is closed.

    The error of the function is there a moment before its thread has ended. So while that lives, it
    may be this one, or one of another thread: it is hidden for :data:`HIDDEN_SECONDS`.
    """
    first_seen: float | None = None

    def get_error_unless_closing() -> BaseException | None:
        nonlocal first_seen
        shown = get_error()  # None also while another scope of this worker hides it
        if closed.is_set() or type(runner).get_error(runner) is None:
            return shown
        now = time.monotonic()
        first_seen = now if first_seen is None else first_seen
        return shown if training.is_alive() and now - first_seen >= HIDDEN_SECONDS else None

    return get_error_unless_closing


def _runner() -> Any:
    """Return the runner of the training function in Ray Train V2; None in another version.

    Without it the run is closed all the same, but as a complete one also when the function raised,
    and maybe without the last step.
    """
    try:
        from ray.train.v2._internal.execution.context import get_train_context

        runner = get_train_context().execution_context.training_thread_runner
    except Exception:
        return None
    known = all(callable(getattr(runner, name, None)) for name in ("is_running", "get_error"))
    return runner if known else None


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a thread uses the device of the training."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
