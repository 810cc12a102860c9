"""Finds the model that an unmodified script trains, and watches it from its first step to its end.

A class of torch's or DeepSpeed's makes a model data parallel. Until the first forward pass of a
training through one of them, these classes carry a hook; then it is taken out again, and
:func:`rankscope.watch` is called as the script could have called it on the line before.

A model without wrapper has no such class. In a job of several ranks, the first call of an optimizer
shows which parameters are trained; the first module that is called after it and holds them all is
the model, or the smallest one where the training calls methods of it. It is watched from the end of
that step on, the second one: no rank waits for another there, as stages of a pipeline do in a step.

A script may train one model after the other, or wrap a model anew. A DDP wrapper that is made while
another is watched, and then trains without it, gets a run of its own; that of the other ends.

This module imports nothing heavy: it is loaded with torch in every process of the job, data loader
workers among them. None of its frames is on the stack when the script's own code runs, so no
traceback shows it.
"""

import atexit
import builtins
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.bus.words import printable
from rankscope.integrations.hooks import AfterImport, CallHook, at_end
from rankscope.integrations.run_script import PID_VARIABLE, ScriptJob
from rankscope.private import Patch
from rankscope.record.stores import Store
from rankscope.wrappers.backward_calls import BackwardCalls, reaches
from rankscope.wrappers.untraced import untraced

if TYPE_CHECKING:
    from rankscope.integrations.beginning import Watching

_log = logging.getLogger("rankscope")

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed._composable.replicate": "DDP",
    "torch.distributed.fsdp._fully_shard._fully_shard": "FSDPModule",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch._dynamo.eval_frame": "OptimizedModule",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
}
_COLLECTIVES = "torch.distributed.distributed_c10d"
_AUTOGRAD = "torch.autograd"
_OPTIMIZER = "torch.optim.optimizer"

_DDP = "torch.nn.parallel.distributed"
_ALONE_FROM = 3  # passes of a later model, none of the watched one between, that take its place
_MOST_RUNS = 32
_MOST_AWAITED = 64  # forward passes without a call of an optimizer

NOTHING = (
    "nothing was watched: several ranks of a process group trained no model together, under "
    "DistributedDataParallel, replicate, fully_shard or DeepSpeed, or without a wrapper"
)
NO_GROUP = (
    "nothing was watched: no process group of several ranks trained a model, and one process has "
    "no other to be compared with; unless it starts its ranks itself, start the script with "
    "torchrun --nproc-per-node 2 or more"
)
FAILED = "the script failed with exit code {code}, and nothing was watched"
ALONE = (
    "nothing was watched: each of {processes} processes (WORLD_SIZE) trained a model of its own, "
    "for torch.distributed was never initialised; call torch.distributed.init_process_group and "
    "wrap the model in DistributedDataParallel"
)


def prepare() -> None:
    """Get ready to watch a training of this process; called before torch is imported."""
    job = ScriptJob.of_this_process()
    if job.parity is None:
        Catch(job).install()
        return
    from rankscope.integrations.parity import ParityCatch

    ParityCatch(job).install()


class Catch:
    """Waits for the first training step of a data-parallel model."""

    def __init__(self, job: ScriptJob) -> None:
        self._job = job
        self._hooks: list[CallHook] = []
        self._done = self._trained = False
        self._num_passes = 0  # since a backward pass has reached an awaited model
        self._calls: Any = weakref.WeakKeyDictionary()  # of each optimizer, in their first order
        self._awaited: Any = weakref.WeakSet()  # models that are watched after their first step
        self._waiting: list[Any] = []  # hooks on their parameters, for that pass
        self._bare: list[Any] = []  # modules without wrapper that hold all trained parameters
        self._called: Any = None  # the first of them that a training step called
        self._scope: Callable[[], Any] = lambda: None  # of the present run
        self._ending = Ending()
        self._watched: Any = weakref.WeakSet()  # models of the present run
        self._optimizers: Any = weakref.WeakSet()  # of the present run
        self._later: Any = weakref.WeakSet()  # DDP wrappers that were made since it began
        self._num_runs = self._num_alone = 0
        wanted: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(_WRAPPERS, self._hook)
        wanted[_COLLECTIVES] = self._patch_destroy
        wanted[_OPTIMIZER] = self._await_optimizer
        if os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
            wanted[_AUTOGRAD] = SingleProcessRun(job).install
        self._imports = AfterImport(wanted)

    def install(self) -> None:
        """Wait for the modules that hold the classes in question."""
        self._imports.install()
        self._ending.notice_exit_codes()

    def _hook(self, module: ModuleType) -> None:
        holder = getattr(module, _WRAPPERS[module.__name__], None)
        if not self._done and isinstance(holder, type):
            self._hooks.append(CallHook(holder, self._before_call))

    def _await_optimizer(self, module: Any) -> None:
        """Hook the first call of an optimizer in a job of several ranks."""
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if not self._done and register is not None:
            untraced(Catch._after_optimizer)
            register(self._after_optimizer)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look for models without wrapper that optimizers train; for none if there are wrappers.

        Where a model is watched, optimizers of others are shown to the run.
        """
        self._trained |= self._num_passes > 0
        try:
            scope = self._scope()
            if scope is not None and optimizer not in self._optimizers:
                scope.see_other_update(optimizer)
            if self._done or not _has_several_ranks():
                return
            calls = self._calls[optimizer] = self._calls.get(optimizer, 0) + 1
            if calls == 1:
                from rankscope.integrations.beginning import bare_models, with_living

                called = list(self._calls)
                self._look_for_bare(bare_models(with_living(called)) or bare_models(called))
                return
            ends_step = list(self._calls)[-1] is optimizer or calls > 2  # of several optimizers
            if not self._bare or not ends_step:
                return
            size = {id(model): sum(1 for _ in model.modules()) for model in self._bare}
            model = self._called or min(self._bare, key=lambda model: size[id(model)])
        except Exception:
            _log.debug("models without wrapper cannot be found", exc_info=True)
            return
        self._watch(model)

    def _look_for_bare(self, models: list[Any]) -> None:
        """Await a call of a model without wrapper; keep the ones of before if there is none."""
        if models:
            self._bare = models
        own = {type(model) for model in self._bare} - {hook.holder for hook in self._hooks}
        self._hooks += [CallHook(kind, self._before_call) for kind in own]

    def _patch_destroy(self, module: Any) -> None:
        """Close the scope when the script destroys the process group that it lives in."""

        def closing(destroy: Callable[[Any], None]) -> Callable[[Any], None]:
            @functools.wraps(destroy)
            def destroy_process_group(group: Any = None) -> None:
                self._ending.before_destroying(group)
                destroy(group)

            return destroy_process_group

        self._ending.replace(module, "destroy_process_group", closing)

    def _before_call(self, model: Any) -> None:
        """Watch from here on if the forward pass that is about to begin is a training's."""
        try:
            if self._done or not _may_train(model, self._bare) or not self._trains(model):
                return
        except Exception as error:
            self._fail(error)
            return
        if any(each is model for each in self._bare):
            self._called = self._called or model
            return
        self._watch(model)

    def _watch(self, model: Any) -> None:
        """Watch a model from now on."""
        try:
            self._done = True
            self._bare = []
            self._called = None
            self._imports.remove()
            for hook in (*self._waiting, *self._hooks):
                hook.remove()
            self._waiting = []
            self._hooks = []
            self._begin(model)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._done = True
        self._job.mark_reported()
        _report_failure(error)

    def _trains(self, model: Any) -> bool:
        """Return whether a forward pass trains, and all ranks begin in it.

        In evaluation mode, and where another rank is in it, only after the first step: a backward
        pass and a call of an optimizer, or many forward passes where no optimizer is known.
        """
        from rankscope.integrations.beginning import begins_later
        from rankscope.wrappers.find import in_training_mode

        awaited = model in self._awaited
        if any(each is model for each in self._bare):
            later = not in_training_mode(model)
        else:
            later = awaited or begins_later(model, evaluates=not in_training_mode(model))
        if later and not awaited:
            self._awaited.add(model)
            self._waiting += [
                parameter.register_post_accumulate_grad_hook(self._note_backward)
                for parameter in model.parameters()
                if parameter.requires_grad and parameter.is_leaf
            ]
        self._num_passes += bool(self._num_passes)
        return not later or self._trained or self._num_passes > _MOST_AWAITED

    def _note_backward(self, parameter: Any) -> None:
        self._num_passes = self._num_passes or 1

    def _begin(self, model: Any) -> None:
        from rankscope.integrations.beginning import Earlier, begin

        again = self._num_runs > 0
        earlier = Earlier(list(self._later), list(self._optimizers)) if again else None
        watching = begin(model, self._job, list(self._calls), earlier)
        self._job.mark_reported()
        if watching is None:
            return
        self._ending.attach(watching)
        self._scope = weakref.ref(watching.scope)
        self._num_runs += 1
        self._watched = weakref.WeakSet(watching.models)
        self._optimizers = weakref.WeakSet(watching.optimizers)
        self._later.clear()
        self._num_alone = 0
        wrappers: Any = sys.modules.get(_DDP)
        if wrappers is not None and not again:
            self._ending.replace(wrappers.DistributedDataParallel, "__init__", self._noting)

    def _noting(self, make: Callable[..., None]) -> Callable[..., None]:
        """Return an ``__init__`` of DDP's that notes the object."""

        @functools.wraps(make)
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            make(wrapper, *args, **kwargs)
            self._later.add(wrapper)
            if not self._hooks and self._num_runs < _MOST_RUNS:
                kind = sys.modules[_DDP].DistributedDataParallel
                self._hooks = [CallHook(kind, self._before_later_call)]

        return init

    def _before_later_call(self, model: Any) -> None:
        """Watch a later model in place of the present one, if it trains without that."""
        try:
            if not _may_train(model) or not model.training:
                return
            if model in self._watched:
                self._num_alone = 0
                return
            if model not in self._later:
                return
            self._num_alone += 1
            if self._num_alone < _ALONE_FROM and not self._takes_over(model):
                return
        except Exception as error:
            self._fail(error)
            return
        self._ending.end_run()
        self._watch(model)

    def _takes_over(self, model: Any) -> bool:
        """Return whether a model trains parameters of the watched one."""
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(p) in own for each in self._watched for p in each.parameters())


class SingleProcessRun:
    """Notices that one of several processes trains without a process group; reports it at exit.

    Until the first backward pass that reaches a parameter, or that finds a process group.
    """

    def __init__(self, job: ScriptJob) -> None:
        self._job = job
        self._calls: BackwardCalls | None = None

    def install(self, autograd: Any) -> None:
        """See every call of ``backward`` from now on."""
        self._calls = BackwardCalls(autograd, self._see)

    def _see(self, caller: FrameType) -> None:
        try:
            if not _has_group():
                if not reaches(caller.f_locals["tensors"], _is_of_parameter):
                    return
                report_single_process_run(self._job)
        except Exception:
            _log.debug("the parameters of a backward pass are unknown", exc_info=True)
        if self._calls is not None:
            self._calls.remove()


def _has_group() -> bool:
    """Return whether this process has a process group now."""
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _is_of_parameter(node: Any) -> bool:
    """Return whether a node of the graph adds up the gradient of a module's parameter."""
    from torch.nn import Parameter

    return isinstance(getattr(node, "variable", None), Parameter)


def _has_several_ranks() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return _has_group() and distributed.get_world_size() > 1


def _may_train(model: Any, bare: Sequence[Any] = ()) -> bool:
    """Return whether a backward pass can follow a call of a model that goes data parallel.

    The ``bare`` models go data parallel without wrapper.
    """
    import torch
    import torch.distributed as dist

    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not (dist.is_available() and dist.is_initialized()):
        return False
    inner = getattr(model, "_orig_mod", model)
    is_bare = any(each is model for each in bare)
    classes = {kind.__name__ for kind in type(inner).__mro__}
    if not is_bare and classes.isdisjoint(_WRAPPERS.values()):
        return False  # compiled, and data parallel further outside
    return any(parameter.requires_grad for parameter in inner.parameters())


def _report_failure(error: Exception) -> None:
    from rankscope.errors import RankscopeError

    if isinstance(error, RankscopeError):  # the same on all ranks
        import torch.distributed as dist

        if dist.get_rank() == 0:
            why = str(error).replace("watch() expected", "expected")  # it was never called
            print_line(f"this training is not watched: {why}")
        return
    _log.warning(
        "rankscope could not begin to watch; training goes on. %s: %s",
        type(error).__name__,
        error,
        exc_info=error,
    )


class Ending:
    """Closes the scope of a script in time."""

    exit_code: ClassVar[Any] = None  # of this process, as far as it was noticed

    def __init__(self) -> None:
        self._watching: Watching | None = None
        self._pid = 0
        self._patches: list[Patch] = []

    def attach(self, watching: "Watching") -> None:
        """Close the run when the process ends, or its process group before."""
        if not self._pid:
            at_end(self, self._finish)
        self._watching = watching
        self._pid = os.getpid()

    def end_run(self, error: BaseException | None = None) -> None:
        """Close the present run; it is incomplete if an error has ended it."""
        watching, self._watching = self._watching, None
        if watching is not None and self._pid == os.getpid():
            with contextlib.suppress(Exception):
                watching.close(error)

    def notice_exit_codes(self) -> None:
        """Store the code of ``sys.exit``, ``exit`` and ``quit``: a failed run is incomplete."""

        def noticing_exit(leave: Callable[[Any], None]) -> Callable[[Any], None]:
            def exit(status: Any = None, /) -> None:  # noqa: A001 the name that it has
                self._notice(status)
                leave(status)

            exit.__doc__ = leave.__doc__
            return exit

        def noticing_quit(call: Callable[[Any, Any], None]) -> Callable[..., None]:
            @functools.wraps(call)
            def quit_noticed(own: Any, code: Any = None) -> None:
                self._notice(code)
                call(own, code)

            return quit_noticed

        self.replace(sys, "exit", noticing_exit)
        quitter: Any = type(vars(builtins).get("exit"))
        if quitter.__name__ == "Quitter":  # both names are objects of this class
            self.replace(quitter, "__call__", noticing_quit)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute until the run is closed."""
        self._patches.append(Patch(owner, name, make))

    def _notice(self, status: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            Ending.exit_code = status

    def before_destroying(self, group: Any) -> None:
        """Close the run before the script destroys its process group; None stands for all."""
        if self._watching is None or self._pid != os.getpid():
            return
        with contextlib.suppress(Exception):
            from torch.distributed import GroupMember

            if group is None or group == GroupMember.WORLD:
                self.end_run(_error_of_script())

    def _finish(self) -> None:
        if self._pid == os.getpid():
            self.end_run(_error_of_script())
            for patch in self._patches:
                patch.remove()


def _error_of_script() -> BaseException | None:
    """Return the exception that ends the script, if it is no success."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None and Ending.exit_code not in (None, 0):
        error = SystemExit(Ending.exit_code)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    return error


def _code_of(error: BaseException) -> int:
    """Return the exit code of a process that an exception ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) else 1


def report_if_nothing_was_watched() -> None:
    """Print that nothing was watched, at the end of the command's process, on rank 0.

    Of a script that failed, it prints the exit code. Processes that it started may have been
    watched in its place: those of this host have removed the job's file, and those of others may
    have left a run here.
    """
    if os.environ.get(PID_VARIABLE) != str(os.getpid()):  # a fork of it
        return
    job = ScriptJob.of_this_process()
    if job.parity is not None:
        return
    if not job.mark_reported() or os.environ.get("RANK", "0") != "0":
        return
    store = Store.of(job.run_dir)
    path = Path(job.run_dir) if store is None else store.copy
    files = [path / "run.json", *path.parent.glob(f"{path.name}-*/run.json")]
    if not any(file.exists() and file.stat().st_mtime >= job.started - 2 for file in files):
        error = _error_of_script()
        why = NOTHING if os.environ.get("WORLD_SIZE", "1") != "1" else NO_GROUP
        print_line(why if error is None else FAILED.format(code=_code_of(error)))


def report_single_process_run(job: ScriptJob) -> None:
    """Print at exit of rank 0 that this process trained alone, unless it failed or has a group."""
    pid = os.getpid()

    def report() -> None:
        if pid != os.getpid() or _has_group() or _error_of_script() is not None:
            return
        job.mark_reported()
        if os.environ.get("RANK", "0") == "0":
            print_line(ALONE.format(processes=os.environ["WORLD_SIZE"]))

    atexit.register(report)


def print_line(message: str) -> None:
    """Write a line to the script's error stream, if it is still open."""
    with contextlib.suppress(Exception):
        print(f"rankscope: {printable(message)}", file=sys.stderr, flush=True)
