"""Begins to watch a model that a script is about to train, on all ranks or on none."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rankscope.errors import RunError
from rankscope.integrations.agreement import agree
from rankscope.integrations.backward_loss import BackwardLoss
from rankscope.integrations.job import Job
from rankscope.integrations.live import Surroundings
from rankscope.session.rendezvous import default_store
from rankscope.session.start import speak_on_stderr, watch
from rankscope.session.wrapping import find_wrapper

if TYPE_CHECKING:
    from rankscope.session.scope import Scope

_log = logging.getLogger("rankscope")

_WATCHED_ALREADY = "the script watches its training itself"


@dataclass(frozen=True, slots=True)
class Watching:
    """A script's training that is being watched.

    Attributes:
        scope: The scope.
        losses: What gives it the losses that its model does not return.
    """

    scope: "Scope"
    losses: BackwardLoss

    def close(self, error: BaseException | None) -> None:
        """Finish the run; one that ``error`` has ended is incomplete."""
        self.losses.remove()
        self.scope.__exit__(None if error is None else type(error), error, None)


def begin(model: nn.Module, job: Job) -> Watching | None:
    """Watch a model from now on, unless the script does so itself.

    Every rank of the model's data-parallel group calls it before its first training step; whether
    all of them do is asked without a collective.

    Args:
        model: What the training calls.
        job: What was asked for.

    Returns:
        What closes it; None if there is nothing to do.

    Raises:
        RankscopeError: It cannot be watched; the same on all ranks.
    """
    speak_on_stderr()
    wrapped = find_wrapper(model)
    around = Surroundings(model)
    problem = _agree(wrapped.group, _WATCHED_ALREADY if around.is_watched else "")
    if problem == _WATCHED_ALREADY:
        _log.info("rankscope run leaves this training alone: %s", problem)
        return None
    if problem:
        raise RunError(problem)
    optimizers = around.optimizers()
    with torch.autocast(wrapped.device.type, enabled=False):
        scope = watch(
            model,
            optimizers[0] if optimizers else None,
            run_dir=job.run_dir,
            config={"script": job.script},
            **job.options,
        )
    losses = BackwardLoss(scope, model)
    try:
        losses.install()
    except Exception as error:
        _log.warning("losses are only seen in the model's output: %s", error, exc_info=error)
    _tell_what_is_left_out(around, optimizers)
    return Watching(scope, losses)


def _agree(group: dist.ProcessGroup, problem: str) -> str:
    ranks = dist.get_process_group_ranks(group)
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(f"rankscope-run/{ranks[0]}/{len(ranks)}", default_store())
    return agree(store, len(ranks), problem)


def _tell_what_is_left_out(around: Surroundings, optimizers: list[Any]) -> None:
    if dist.get_rank() != 0:
        return
    others = [type(model).__name__ for model in around.other_models()]
    if others:
        _log.warning(
            "rankscope watches the model that trains first; not watched: %s", ", ".join(others)
        )
    if len(optimizers) > 1:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers[1:])
        _log.warning("rankscope follows the settings of the first optimizer, not of %s", names)
    if not optimizers:
        _log.info("rankscope found no optimizer of the model")
