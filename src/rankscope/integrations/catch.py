"""Finds the model that an unmodified script trains, and watches it from its first step on.

What makes a model data parallel is a class of torch's or DeepSpeed's. Until the first forward pass
of a training through one of them, these classes carry a hook; then it is taken out again, and
:func:`rankscope.watch` is called as the script could have called it on the line before.

This module imports nothing heavy: it is loaded with torch in every process of the job, data loader
workers among them. None of its frames is on the stack when the script's own code runs, so no
traceback shows it.
"""

import functools
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any

from rankscope.integrations.ending import Ending, say, tell_of_lone_training
from rankscope.integrations.imports import AfterImport
from rankscope.integrations.job import Job

_log = logging.getLogger("rankscope")

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp._fully_shard._fully_shard": "FSDPModule",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch._dynamo.eval_frame": "OptimizedModule",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
}
_COLLECTIVES = "torch.distributed.distributed_c10d"
_AUTOGRAD = "torch.autograd"
_MOST_NODES = 1000


def prepare() -> None:
    """Get ready to watch what this process trains; called before torch is imported."""
    Catch(Job.of_this_process()).install()


class Catch:
    """Waits for the first training step of a data-parallel model.

    Args:
        job: What was asked for.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._hooks: list[CallHook] = []
        self._done = self._trained = False
        self._waiting: list[Any] = []  # for a backward pass that reaches a parameter
        self._ending = Ending()
        wanted: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(_WRAPPERS, self._hook)
        wanted[_COLLECTIVES] = self._mind_the_end
        if os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
            wanted[_AUTOGRAD] = LoneTraining(job).install
        self._imports = AfterImport(wanted)

    def install(self) -> None:
        """Wait for the modules that hold the classes in question."""
        self._imports.install()
        self._ending.notice_exit_codes()

    def _hook(self, module: ModuleType) -> None:
        holder = getattr(module, _WRAPPERS[module.__name__], None)
        if not self._done and isinstance(holder, type):
            self._hooks.append(CallHook(holder, self._before_call))

    def _mind_the_end(self, module: Any) -> None:
        """Close the scope when the script destroys the process group that it lives in."""
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            self._ending.before_destroying(group)
            destroy(group)

        module.destroy_process_group = destroy_process_group

    def _before_call(self, model: Any) -> None:
        """See a forward pass that is about to begin; watch from here on if it is a training's."""
        try:
            if self._done or not _may_train(model) or not self._trains(model):
                return
            self._done = True
            self._imports.remove()
            self._stop_waiting()
            for hook in self._hooks:
                hook.remove()
            self._begin(model)
        except Exception as error:
            self._done = True
            self._job.tell()
            _say_why_not(error)

    def _trains(self, model: Any) -> bool:
        """Return whether a forward pass trains; one in evaluation mode once a backward pass did."""
        from rankscope.session.wrapping import in_training_mode

        if self._trained or in_training_mode(model):
            return True
        if not self._waiting:
            self._waiting = [
                parameter.register_post_accumulate_grad_hook(self._note_trained)
                for parameter in model.parameters()
                if parameter.requires_grad and parameter.is_leaf
            ]
        return False

    def _note_trained(self, parameter: Any) -> None:
        self._trained = True

    def _stop_waiting(self) -> None:
        for hook in self._waiting:
            hook.remove()
        self._waiting.clear()

    def _begin(self, model: Any) -> None:
        from rankscope.integrations.beginning import begin

        watching = begin(model, self._job)
        self._job.tell()
        if watching is not None:
            self._ending.attach(watching)


class CallHook:
    """A ``__call__`` of a class that looks at the instance first, and then is what it was before.

    It is a descriptor: Python asks it for the method and calls that itself. So it is never on the
    stack while the method runs.

    Args:
        holder: The class that gets the hook.
        before: Called with the instance before each call of it.
    """

    def __init__(self, holder: Any, before: Callable[[Any], None]) -> None:
        self._holder = holder
        self._before = before
        self._own: Any = vars(holder).get("__call__")
        holder.__call__ = self

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            self._before(instance)
        if self._own is not None:
            return self._own.__get__(instance, owner)
        above: Any = super(self._holder, owner if instance is None else instance)
        return above.__call__

    def remove(self) -> None:
        """Leave the class as it was."""
        if vars(self._holder).get("__call__") is not self:
            return
        if self._own is None:
            del self._holder.__call__
        else:
            self._holder.__call__ = self._own


class SeenFromBelow:
    """A function that lets someone look at its caller first, and is never on the stack itself.

    Python asks for its ``__call__``, which is the function, and calls that.

    Args:
        function: The function.
        see: Called with the frame of whoever is about to call it; must not raise.
    """

    def __init__(self, function: Callable[..., Any], see: Callable[[FrameType], None]) -> None:
        self.function = function
        self._see = see

    @property
    def __call__(self) -> Callable[..., Any]:
        """The function; whoever asks for it is about to call it."""
        self._see(sys._getframe(1))
        return self.function


class LoneTraining:
    """Notices that one of several processes trains without a process group, and says so at its end.

    Until the first backward pass that reaches a parameter, or that finds a process group.

    Args:
        job: What was asked for.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._autograd: Any = None
        self._seen: SeenFromBelow | None = None

    def install(self, autograd: Any) -> None:
        """See every call of ``backward`` from now on."""
        self._autograd = autograd
        self._seen = autograd._make_grads = SeenFromBelow(autograd._make_grads, self._see)

    def _see(self, caller: FrameType) -> None:
        try:
            grouped = _has_group()
            if not grouped:
                ours = caller.f_globals is vars(self._autograd)
                if not (ours and caller.f_code.co_name == "backward"):
                    return
                if not _reach_parameter(caller.f_locals["tensors"]):
                    return
                tell_of_lone_training(self._job, _has_group)
        except Exception:
            _log.debug("what a backward pass trains is unknown", exc_info=True)
        self._remove()

    def _remove(self) -> None:
        if self._seen is not None and self._autograd._make_grads is self._seen:
            self._autograd._make_grads = self._seen.function


def _has_group() -> bool:
    """Return whether this process has a process group now."""
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _reach_parameter(roots: Iterable[Any]) -> bool:
    """Return whether a backward pass from ``roots`` reaches a parameter of a module."""
    from torch.nn import Parameter

    waiting: deque[Any] = deque(root.grad_fn for root in roots)
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), Parameter):
            return True
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
    return False


def _may_train(model: Any) -> bool:
    """Return whether a backward pass can follow a call of a model that goes data parallel."""
    import torch
    import torch.distributed as dist

    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not (dist.is_available() and dist.is_initialized()):
        return False
    inner = getattr(model, "_orig_mod", model)
    if not any(_is_a(inner, name) for name in _WRAPPERS.values()):
        return False  # compiled, and data parallel further outside
    return any(parameter.requires_grad for parameter in inner.parameters())


def _is_a(model: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(model).__mro__)


def _say_why_not(error: Exception) -> None:
    from rankscope.errors import RankscopeError

    if isinstance(error, RankscopeError):  # the same on all ranks
        import torch.distributed as dist

        if dist.get_rank() == 0:
            say(f"this training is not watched: {error}")
        return
    _log.warning(
        "rankscope could not begin to watch; training goes on. %s: %s",
        type(error).__name__,
        error,
        exc_info=error,
    )
