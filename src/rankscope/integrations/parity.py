"""Records an unmodified training for ``rankscope parity``, and ends it after some steps.

The model is found at its first forward pass with gradients after an optimizer of its parameters was
made: a process group, several ranks or a wrapper are not needed. Where Lightning does not wrap the
model, a call of its ``training_step`` counts as a forward pass. No monitor and no agent runs.

This module imports nothing heavy: it is loaded with torch in every process of the job.
"""

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rankscope.bus.parity import FOLDER
from rankscope.bus.words import count
from rankscope.integrations.hooks import AfterImport, CallHook, at_end
from rankscope.integrations.run_script import ScriptJob
from rankscope.private import Patch, callers

_log = logging.getLogger("rankscope")

_OPTIMIZER = "torch.optim.optimizer"
_COMPILED = "torch._dynamo.eval_frame"
_FSDP = "torch.distributed.fsdp"
_PIPELINING = "torch.distributed.pipelining"
_STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}
)
_MEET_SECONDS = 20.0
_LOOK_SECONDS = 0.1
_STILL = 10  # looks in a row that must find a rank waiting, before it is ended


@dataclass(frozen=True, slots=True)
class ParityJob:
    """What is recorded, and what changes before the first step.

    The first of ``steps`` has the number ``first_step``; the training ends (``stops``) at the
    beginning of the step after the last. ``eps`` is the relative size of the moves of a quarter of
    the parameters' elements, 0 for none. ``save_start`` writes the start beside the record;
    ``load_start`` is the folder of another training's start, empty for none. ``rules`` are
    names of parameters in the other layout, each with its names in this one. With ``bisects``,
    outputs of layers are recorded as well.
    """

    steps: int
    first_step: int = 0
    stops: bool = True
    eps: float = 0.0
    no_dropout: bool = False
    save_start: bool = False
    load_start: str = ""
    rules: Sequence[tuple[str, Sequence[str]]] = ()
    bisects: bool = False
    compare_with: str = ""  # the record, as the line at the end names it; empty for no line


class ParityCatch:
    """Waits for the first training step of a process, and records from then on."""

    def __init__(self, job: ScriptJob) -> None:
        self._job = job
        self._parity = ParityJob(**(job.parity or {}))
        self._optimizers: list[weakref.ref[Any]] = []
        self._calls: list[CallHook] = []
        self._made: Patch | None = None
        self._in_closure: Any = None
        self._training: _Training | None = None
        by_method = dict.fromkeys(_STRATEGIES, self._await_training_step)
        self._imports = AfterImport({_OPTIMIZER: self._await_optimizer, **by_method})

    def install(self) -> None:
        """Wait for torch's optimizers."""
        self._imports.install()

    def _await_optimizer(self, module: ModuleType) -> None:
        optimizer: Any = vars(module)["Optimizer"]

        def noticing(original: Any) -> Any:
            @functools.wraps(original)
            def init(own: Any, *args: Any, **kwargs: Any) -> None:
                original(own, *args, **kwargs)
                self._notice(own)

            return init

        self._made = Patch(optimizer, "__init__", noticing)

    def _await_training_step(self, module: ModuleType) -> None:
        def recorded(original: Any) -> Any:
            @functools.wraps(original)
            def training_step(own: Any, *args: Any, **kwargs: Any) -> Any:
                model = own.lightning_module
                if own.model is not model:  # the wrapper is called
                    return original(own, *args, **kwargs)
                self._before_call(model, by_method=True)
                training = self._training
                if training is None or training.model is not model:
                    return original(own, *args, **kwargs)
                training.before_forward(model, args, kwargs)
                output = original(own, *args, **kwargs)
                training.after_forward(model, args, kwargs, output)
                return output

            return training_step

        Patch(vars(module)["Strategy"], "training_step", recorded)

    def _notice(self, optimizer: Any) -> None:
        """Store an optimizer; from the first one on, watch the calls of modules."""
        self._optimizers.append(weakref.ref(optimizer))
        if self._calls or self._training is not None:
            return
        from torch.nn import Module
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._in_closure = register_optimizer_step_pre_hook(self._await_closure)
        holders = [Module, getattr(sys.modules.get(_COMPILED), "OptimizedModule", None)]
        own = [h for h in holders if h is not None and "__call__" in vars(h)]
        self._calls = [CallHook(holder, self._before_call) for holder in own]

    def _await_closure(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Begin the first update of a training that begins inside a closure."""

        def after() -> None:
            if self._training is not None:
                self._training.enter_step(optimizer)

        return _after_closure(args, kwargs, after) if self._training is None else None

    def _before_call(self, model: Any, *, by_method: bool = False) -> None:
        try:
            if self._training is not None or not self._trains(model):
                return
            for hook in self._calls:
                hook.remove()
            self._calls = []
            self._imports.remove()
            self._in_closure.remove()
            stages = _stages_around() or [model]
            for stage in stages:
                _reshard(stage)
            self._training = _Training(
                stages, self._job, self._parity, self._living(), by_method=by_method
            )
        except Exception as error:
            for hook in self._calls:
                hook.remove()
            _log.warning("parity cannot record this training: %s", error, exc_info=True)
            _fail(self._job, error)

    def _trains(self, model: Any) -> bool:
        import torch

        from rankscope.wrappers.optimizers import holds_any, trained_copies

        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        parameters = [*model.parameters(), *_sharded_parameters(model)]
        living = self._living()
        return holds_any(living, parameters) or bool(trained_copies(living, parameters))

    def _living(self) -> list[Any]:
        return [each for ref in self._optimizers if (each := ref()) is not None]


def _recording(method: Callable[..., Any]) -> Callable[..., Any]:
    """Stop recording where a method of a training fails: the training goes on."""

    @functools.wraps(method)
    def run(self: "_Training", *args: Any, **kwargs: Any) -> Any:
        if self.failed:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.failed = True
            _log.warning("parity can no longer record this training: %s", error, exc_info=True)
            _fail(self.job, error)
            self._finish()
            return None

    return run


class _Training:
    """A training that is recorded, until it has had its steps.

    ``models`` are its model, or the stages of a pipeline on this rank: the forward pass of the
    first one begins a micro-batch. With ``by_method``, the caller reports when a method of the
    model in place of its forward pass begins and ends.
    """

    def __init__(
        self,
        models: Sequence[Any],
        job: ScriptJob,
        parity: ParityJob,
        optimizers: Sequence[Any],
        *,
        by_method: bool = False,
    ) -> None:
        import torch
        from torch.optim import optimizer as of_torch

        from rankscope.evidence import EVIDENCE
        from rankscope.wrappers.backward_loss import BackwardLoss
        from rankscope.wrappers.pipelining import JoinedStages

        model, *others = models
        self.job = job
        self.model = model
        self.failed = False
        folder = Path(job.run_dir) / FOLDER
        rank, world, data_ranks = _ranks_of(model)
        self._parity = parity
        self._pid = os.getpid()
        self._shows_end = bool(parity.compare_with) and rank == 0
        start = {
            "eps": parity.eps,
            "no_dropout": parity.no_dropout,
            "save_to": Path(job.run_dir) / "start" if parity.save_start else None,
            "load_from": Path(parity.load_start) if parity.load_start else None,
        }
        place = {"folder": folder, "rank": rank, "world": world, "data_ranks": data_ranks}
        inside = (
            JoinedStages(list(map(_inside, models))) if others else _whole_of(model, optimizers)
        )
        recorders = (
            each.make_recorder(
                inside,
                place=place,
                start=start,
                num_steps=parity.steps,
                first_step=parity.first_step,
                rules=parity.rules,
                bisects=parity.bisects,
                wrapper=model,
                optimizers=optimizers,
            )
            for each in EVIDENCE
        )
        self._recorder: Any = next(filter(None, recorders))
        self._depth = 0
        self._fed = False
        self._updated = False
        self._count = 0
        give = partial(self._recorder.loss, spare=True)
        self._losses = BackwardLoss(self._recorder, list(models), give)
        before = self.before_forward
        after = self.after_forward
        passes = (
            ()
            if by_method
            else (
                model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                model.register_forward_hook(after, with_kwargs=True),
            )
        )
        self._hooks: list[Any] = [
            *passes,
            *(each.register_forward_pre_hook(self._before_stage, prepend=True) for each in others),
            *(each.register_forward_hook(after, with_kwargs=True) for each in others),
            of_torch.register_optimizer_step_pre_hook(self._before_step),
            of_torch.register_optimizer_step_post_hook(self._after_step),
        ]
        self._backward = Patch(torch.autograd, "backward", self._around_backward)
        self._losses.install()
        at_end(self, self._finish)

    @_recording
    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Note that a forward pass begins; end the training if it is one too many."""
        import torch

        from rankscope.wrappers.passes import tensors_in

        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        given = tensors_in((args, kwargs))
        if any(each.is_meta for each in given) or _looks_for_shapes():
            return
        self._fed = any(each.requires_grad for each in given)
        if self._updated:
            self._updated = False
            self._count += 1
            if self._count == self._parity.steps:
                self._finish()
                if self._parity.stops:
                    _meet()
                    raise SystemExit(0)
                return
        self._recorder.on_inputs(args, kwargs)

    @_recording
    def _before_stage(self, model: Any, args: Any) -> None:
        """Note that another stage of this rank goes on with a micro-batch."""
        if self._recorder.training and not _looks_for_shapes():
            self._recorder.go_on()

    @_recording
    def after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note that a forward pass has ended."""
        if self._recorder.training:
            self._recorder.on_output(output, kwargs)

    def _around_backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._see_roots(tensors if isinstance(tensors, list | tuple) else (tensors,))
            original(tensors, *args, **kwargs)
            self._see_reduced()

        return backward

    @_recording
    def _see_roots(self, tensors: Any) -> None:
        self._recorder.see_roots(tensors)

    @_recording
    def _see_reduced(self) -> None:
        self._recorder.see_reduced()

    @_recording
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth != 1:
            return None
        if not self._recorder.knows(optimizer):
            self._recorder.see_other(optimizer)
            return None
        before_update = functools.partial(self._recorder.see_update, optimizer)
        with_closure = _after_closure(args, kwargs, before_update)
        if with_closure is None:
            before_update()
        return with_closure

    @_recording
    def enter_step(self, optimizer: Any) -> None:
        """Note that an update begins: the closure before it has begun the training."""
        self._depth = 1
        if self._recorder.knows(optimizer):
            self._recorder.see_update(optimizer)

    @_recording
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._recorder.knows(optimizer):
            self._recorder.after_update(optimizer)
            was_last = not self._updated and self._count == self._parity.steps - 1
            if was_last and self._fed and self._parity.stops:
                threading.Thread(target=self._end_with_others, daemon=True).start()
            self._updated = True

    def _end_with_others(self) -> None:
        """End with the rank that feeds this one: a later stage waits for it before its pass."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        store = _store_of_end()
        still = 0
        while still < _STILL:
            time.sleep(_LOOK_SECONDS)
            if self._count == self._parity.steps:
                return  # it has come there by itself
            still = still + 1 if store.check(["ready"]) and _waits_for_others() else 0
        self._finish()
        _meet()
        sys.stdout.flush()
        os._exit(0)

    def _finish(self) -> None:
        """Write what is left, and leave torch as it was."""
        if os.getpid() != self._pid:
            return
        self._recorder.close()
        self._show_end()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            with contextlib.suppress(Exception):
                hook.remove()
        self._backward.remove()
        self._losses.remove()

    def _show_end(self) -> None:
        """Print on rank 0 what was recorded, and the command that compares it."""
        if not self._shows_end or self.failed:
            return
        self._shows_end = False
        steps = self._count + self._updated
        ended = self._parity.stops and self._count == self._parity.steps
        path = self._parity.compare_with
        print(
            f"rankscope: {count(steps, 'step')} recorded in {path}"
            f"{', and the training ended' if ended else ''}; to compare: "
            f'rankscope parity -a {path} -b "COMMAND"',
            file=sys.stderr,
        )


def _after_closure(args: Any, kwargs: Any, after: Callable[[], None]) -> Any:
    """Return the arguments of an optimizer's step whose closure calls ``after`` at its end.

    The closure holds forward and backward pass, and the update comes after it. None without one.
    """
    own, *more = args
    closure = more[0] if more else kwargs.get("closure")
    if closure is None:
        return None

    def watched() -> Any:
        result = closure()
        after()
        return result

    return (own, watched), {name: value for name, value in kwargs.items() if name != "closure"}


def _sharded_parameters(model: Any) -> list[Any]:
    """Return FSDP2's shards: a pass without gradient leaves whole parameters in their place."""
    if _FSDP not in sys.modules:
        return []
    from rankscope.wrappers.fsdp2_model import every_parameter

    return [each.tensor for each in every_parameter(model)]


def _reshard(model: Any) -> None:
    """Put FSDP2's shards back in their place before a forward pass, which gathers them again."""
    if _FSDP in sys.modules:
        for module in model.modules():
            if isinstance(module, sys.modules[_FSDP].FSDPModule):
                module.reshard()


def _inside(model: Any) -> Any:
    """Return the model inside its wrappers."""
    while True:
        kinds = {kind.__name__ for kind in type(model).__mro__}
        inner = getattr(model, "_orig_mod", None)
        if inner is None and not kinds.isdisjoint(_WRAPPERS):
            inner = getattr(model, "module", None)
        if inner is None or inner is model:
            return model
        model = inner


def _whole_of(model: Any, optimizers: Sequence[Any]) -> Any:
    """Return the model inside its wrappers, or what it is a part of.

    A loop may call the parts of a model alone: then the smallest module that holds all that the
    optimizers of the part train.
    """
    from torch.nn import Module

    from rankscope.wrappers.living import live_objects

    inside = _inside(model)
    own = _parameters_of(inside)
    held = ({id(p) for g in each.param_groups for p in g["params"]} for each in optimizers)
    trained = set().union(*(one for one in held if one & own))
    if trained <= own:
        return inside
    around = [
        module for module in live_objects(Module)[Module] if trained | own <= _parameters_of(module)
    ]
    smallest = min(around, key=lambda module: len(list(module.modules())), default=inside)
    return _inside(smallest)


def _parameters_of(module: Any) -> set[int]:
    return set(map(id, module.parameters()))


def _ranks_of(model: Any) -> tuple[int, int, list[int]]:
    """Return this rank, the number of ranks, and the ranks whose data make up the global batch.

    Of the latter none where it is not known which ranks share a worker.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from rankscope.errors import RankscopeError
    from rankscope.wrappers.find import find_wrapper
    from rankscope.wrappers.ranks import ranks_of

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1, [0]
    rank = dist.get_rank()
    world = dist.get_world_size()
    try:
        return rank, world, ranks_of(find_wrapper(model).group)
    except RankscopeError:
        sharded = any(isinstance(p, DTensor) for p in model.parameters())
        return rank, world, [] if sharded else list(range(world))


def _meet() -> None:
    """Wait until all ranks have come to the end: one that leaves first may end the others."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        from rankscope.wrappers.rendezvous import agree

        if dist.is_initialized() and dist.get_world_size() > 1:
            agree(_store_of_end(), dist.get_world_size(), "", _MEET_SECONDS)


def _stages_around() -> list[Any]:
    """Return the stages on this rank of the pipeline's schedule that runs; none unless several."""
    for frame in callers() if _PIPELINING in sys.modules else ():
        if str(frame.f_globals.get("__name__", "")).startswith(_PIPELINING):
            stages = getattr(frame.f_locals.get("self"), "_stages", ())
            if len(stages) > 1:
                return [each.submod for each in sorted(stages, key=lambda s: s.stage_index)]
    return []


def _looks_for_shapes() -> bool:
    """Return whether a pipeline's schedule calls the model only to find the shapes it returns."""
    names = {frame.f_code.co_name for frame in callers()} if _PIPELINING in sys.modules else ()
    return "_forward_metadata_inference" in names


def _store_of_end() -> Any:
    import torch.distributed as dist

    from rankscope.wrappers.rendezvous import default_store

    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore("rankscope-parity/end", default_store())


def _waits_for_others() -> bool:
    """Return whether the main thread is in a call of torch's that waits for other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.distributed") and "checkpoint" not in module:
            return True
        frame = frame.f_back
    return False


def _fail(job: ScriptJob, error: Exception) -> None:
    """Write a record that holds only the reason why there is none."""
    with contextlib.suppress(Exception):
        from rankscope.bus.parity import RankStep, file_of_step, folder_of_rank
        from rankscope.files import replace

        rank = int(os.environ.get("RANK", "0"))
        folder = Path(job.run_dir) / FOLDER / folder_of_rank(rank)
        folder.mkdir(parents=True, exist_ok=True)
        words = f"{type(error).__name__}: {error}"
        replace(folder / file_of_step(0), RankStep(rank, 0, {"failed": words}, {}).pack())
