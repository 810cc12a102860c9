"""How a model goes data parallel: its wrapper, the ranks to compare, the tap that fits.

In a job of several ranks a model without wrapper counts as well: its loop, or its optimizer,
reduces.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankscope.bus.groups import Groups
from rankscope.bus.words import dtype_name
from rankscope.errors import UnsupportedError
from rankscope.gradients.names import canonical_name
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.ddp import DDPTap
from rankscope.wrappers.deepspeed import DeepSpeedTap, deepspeed_process_group, is_deepspeed
from rankscope.wrappers.fsdp2 import FSDP2Tap
from rankscope.wrappers.fsdp2_mesh import MeshPlace, log_other_mesh, mesh_place
from rankscope.wrappers.fsdp2_model import (
    fsdp2_device,
    fsdp2_parameters,
    fsdp2_process_group,
    fsdp2_replica,
    is_fsdp2,
    parameters_by_mesh,
)
from rankscope.wrappers.loop import LoopTap
from rankscope.wrappers.megatron import (
    MegatronTap,
    is_megatron,
    megatron_parameters,
    megatron_process_group,
)
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.tap import GradientObserver, GradientTap, Guarded, ReadReduced

_log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True)
class WrapperKind:
    """A way in which a model goes data parallel."""

    name: str  # in messages and in the record
    no_canary: str = ""  # why a worker cannot run its model without the others; empty if it can
    no_reference: str = ""  # why a step's gradient cannot be computed again; empty if it can
    state_by_parameter: bool = True  # an optimizer's state belongs to single parameters, as a rule
    updates_at_once: bool = True  # each worker has the new parameters when ``step`` returns
    traces: bool = False  # rank 0 holds whole parameters and gradients, and can keep a trace

    def __str__(self) -> str:
        return self.name


def _no_whole(name: str) -> str:
    return f"a canary runs the whole model on each worker alone, which under {name} no worker holds"


DDP = WrapperKind("DDP", traces=True)

DDP_PARTS = WrapperKind(
    "DDP",
    no_canary="the training calls the parts of the model one by one, each in a DDP of its own",
    no_reference="the training calls its parts one by one, each in a DDP of its own",
)
"""A model of several parts, each in a DDP of its own."""

REPLICATE = WrapperKind(
    "replicate",
    no_canary="replicate() reduces in hooks of the model itself, so no worker can run it alone",
)
FSDP2 = WrapperKind("FSDP2", no_canary=_no_whole("FSDP2"))
DEEPSPEED = WrapperKind(
    "DeepSpeed",
    no_canary=_no_whole("DeepSpeed"),
    state_by_parameter=False,
    updates_at_once=False,
)
MEGATRON = WrapperKind(
    "Megatron-core",
    no_canary="a canary's backward pass would add to the gradients in Megatron-core's buffers",
    no_reference="its backward pass would add to the gradients in Megatron-core's buffers",
)

LOOP = WrapperKind("loop", updates_at_once=False)
"""A model without wrapper, whose training reduces gradients itself."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A data-parallel model as it was found."""

    kind: WrapperKind
    wrapper: nn.Module
    """The module that reduces gradients; under ``replicate``, the DDP that hooks of the model call;
    the model itself where nothing wraps it."""
    parameters: dict[str, Tensor]  # that require a gradient, by canonical name
    group: dist.ProcessGroup  # whose ranks are compared; each of them is a worker
    device: torch.device  # of the gradients
    optimizer: torch.optim.Optimizer | None = None  # where the wrapper holds it
    replica: int | None = 0  # equal on workers of the same parameters; None: each has one owner
    replicated: nn.Module | None = None  # to which ``replicate`` was applied
    mesh: MeshPlace | None = None  # this rank's place, beside the data-parallel axes
    parts: "JointModel | None" = None
    """The model inside, where the training has several parts, each in a DDP of its own: ``wrapper``
    is that of the first, whose forward pass begins a micro-batch."""
    held: frozenset[str] | None = None
    """The parameters in this rank's optimizer, where a loop reduces gradients and it holds some or
    none; None if it holds all, or some with other tensors."""
    in_shares: bool = False  # each of the others is in the optimizer of one other rank, or in none
    # names of parameters whose gradients other ranks sum with these, where a loop does; may grow
    summed: set[str] = field(default_factory=set)

    @property
    def module(self) -> nn.Module:
        """The model inside the wrapper; the same where a layer may be called so."""
        if self.parts is not None:
            return self.parts
        if self.replicated is not None:
            return self.replicated
        if self.kind in (FSDP2, LOOP):
            return self.wrapper
        inner = getattr(self.wrapper, "module", None)
        return inner if isinstance(inner, nn.Module) else self.wrapper

    @property
    def ddps(self) -> Sequence[DistributedDataParallel]:
        """The wrappers, where they are DDP."""
        if self.parts is not None:
            return self.parts.wrappers
        return [self.wrapper] if isinstance(self.wrapper, DistributedDataParallel) else []

    def reduces(self) -> Callable[[Tensor], bool] | None:
        """Return a test whether the wrapper reduces a parameter's gradient; None if it reduces all.

        DDP does not reduce a parameter that was frozen when it was wrapped, and keeps no list of
        those: the present flag counts. One that it reduces all the same is equal on all workers,
        and makes no finding.
        """
        if not isinstance(self.wrapper, DistributedDataParallel):
            return None
        lists: list[Any] = [getattr(each, "_module_parameters", None) for each in self.ddps]
        if any(parameters is None for parameters in lists):
            return None
        reduced = {id(p) for parameters in lists for p in parameters or () if p.requires_grad}
        return lambda parameter: id(parameter) in reduced

    def left_out(self) -> frozenset[str]:
        """Return the canonical names of the parameters that DDP ignores."""
        if self.parts is not None:
            return self.parts.left_out()
        if self.replicated is None:
            return frozenset(getattr(self.wrapper, "parameters_to_ignore", ()))
        wrapped = {id(parameter) for parameter in self.wrapper.parameters()}
        named = self.replicated.named_parameters()
        return frozenset(canonical_name(name) for name, p in named if id(p) not in wrapped)

    def broadcasts(self) -> Callable[[], bool] | None:
        """Return a test whether DDP broadcasts buffers before a forward pass; None if never.

        None also where a hook of the user's does it, at an unknown time.
        """
        ddp = self.wrapper
        if not isinstance(ddp, DistributedDataParallel) or self.replicated is not None:
            return None
        broadcasts = getattr(ddp, "forward_sync_buffers", None)  # its later name
        if not (ddp.broadcast_buffers if broadcasts is None else broadcasts):
            return None
        return None if hasattr(ddp, "buffer_hook") else ddp.will_sync_module_buffers

    def make_tap(
        self,
        sketcher: Sketcher,
        guarded: Guarded,
        reduced: ReadReduced,
        observer: GradientObserver,
        shadowed: Callable[[], None],
        unawaited: Callable[[bool], None],
    ) -> GradientTap:
        """Return a tap that reads this model's local gradients from now on."""
        wrapper = self.wrapper
        parameters = self.parameters
        if isinstance(wrapper, DistributedDataParallel):
            return DDPTap(
                self.ddps,
                parameters,
                sketcher,
                guarded,
                reduced=reduced,
                observer=observer,
                shadowed=shadowed,
                unawaited=unawaited,
            )
        if self.kind is LOOP:
            return LoopTap(
                parameters,
                ranks_of(self.group),
                sketcher,
                guarded,
                reduced=reduced,
                observer=observer,
                summed=self.summed,
                unawaited=unawaited,
                held=self.held,
                in_shares=self.in_shares,
            )
        if is_deepspeed(wrapper):
            return DeepSpeedTap(wrapper, parameters, sketcher, guarded, reduced=reduced)
        if is_megatron(wrapper):
            return MegatronTap(wrapper, parameters, sketcher, guarded, reduced=reduced)
        assert self.kind in (FSDP2, REPLICATE), self.kind
        return FSDP2Tap(wrapper, parameters, sketcher, guarded, reduced=reduced, observer=observer)


class JointModel(nn.Module):
    """The parts of a training that have a DDP each, two or more, as one model. It is never called.

    A parameter's name begins with the class of its part. Where several have one class, it is the
    first variable of the script that holds the part, or the class and a number.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        super().__init__()
        self.wrappers = tuple(wrappers)
        kinds = [type(each.module).__name__ for each in wrappers]
        several = {kind for kind, count in Counter(kinds).items() if count > 1}
        names = [f"{kind}{n}" if kind in several else kind for n, kind in enumerate(kinds)]
        alike = [n for n, kind in enumerate(kinds) if kind in several]
        known = [_variable_of(wrappers[n]) for n in alike]
        if all(known) and len({*names, *known}) == len(names) + len(known):
            names = [known[alike.index(n)] if n in alike else name for n, name in enumerate(names)]
        self.named_wrappers = list(zip(names, wrappers, strict=True))
        """The wrappers with the names of their parts."""
        for name, each in self.named_wrappers:
            self.add_module(name, each.module)

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters that require a gradient and are reduced, by canonical name."""
        return {
            f"{part}.{name}": parameter
            for part, wrapper in self.named_wrappers
            for name, parameter in _trained(wrapper).items()
        }

    def left_out(self) -> frozenset[str]:
        """Return the canonical names of the parameters that the wrappers ignore."""
        return frozenset(
            f"{part}.{canonical_name(name)}"
            for part, wrapper in self.named_wrappers
            for name in getattr(wrapper, "parameters_to_ignore", ())
        )


def _variable_of(wrapper: DistributedDataParallel) -> str:
    """Return the first variable of the script that is a wrapper or its module; empty without."""
    script = vars(sys.modules["__main__"])
    both = {id(wrapper), id(wrapper.module)}
    return next((name for name, value in [*script.items()] if id(value) in both), "")


def find_parts(models: Sequence[nn.Module]) -> Wrapped:
    """Return how the parts of a training are wrapped, each in a DDP of its own.

    The first one's forward pass begins a micro-batch.
    """
    if len(models) == 1:
        return find_wrapper(models[0])
    wrappers = [getattr(model, "_orig_mod", model) for model in models]
    ddps = [each for each in wrappers if isinstance(each, DistributedDataParallel)]
    others = [type(each).__name__ for each in wrappers if each not in ddps]
    if others or not ddps:
        raise UnsupportedError(
            "watch() expected several models to be in a DistributedDataParallel each, got "
            f"{others[0] if others else 'none'}; watch one model"
        )
    first = ddps[0]
    if any(set(_ranks(each)) != set(_ranks(first)) for each in ddps):
        raise UnsupportedError(
            "watch() expected the same ranks in all DistributedDataParallel of a training, got "
            "process groups of different ones; watch one model"
        )
    parts = JointModel(ddps)
    parameters = parts.trained()
    for each in ddps:
        _check_ddp(each, parameters)
    device = next(iter(parameters.values()), next(first.parameters())).device
    return Wrapped(DDP_PARTS, first, parameters, first.process_group, device, parts=parts)


def _ranks(ddp: DistributedDataParallel) -> list[int]:
    return ranks_of(ddp.process_group)


def find_wrapper(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> Wrapped:
    """Return how a model is wrapped, as the training calls it, compiled or not.

    ``process_group`` has the workers of a model without wrapper, None for all ranks; under FSDP2
    those of one of its meshes, None for the largest. UnsupportedError where none can be watched.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile around the wrapper
    if isinstance(inner, DistributedDataParallel):
        parameters = _trained(inner)
        _check_ddp(inner, parameters)
        device = next(iter(parameters.values()), next(inner.parameters())).device
        return Wrapped(DDP, inner, parameters, inner.process_group, device)
    ddp = composable_ddp(inner)
    if ddp is not None:
        return _find_replicated(inner, ddp)
    if isinstance(inner, FullyShardedDataParallel):
        raise UnsupportedError(
            "watch() expected DDP or FSDP2, got FSDP1, whose flat parameters hide the local "
            "gradient of a layer; move to torch.distributed.fsdp.fully_shard"
        )
    if is_deepspeed(inner):
        return _find_deepspeed(inner)
    if is_fsdp2(inner):
        return _find_sharded(inner, process_group)
    if is_megatron(inner):
        return _find_megatron(inner)
    whole = _wrapped_whole(inner)
    if whole is not None:
        return find_wrapper(whole, process_group)
    _check_bare(inner)
    return _find_loop(inner, process_group or dist.group.WORLD)


def _wrapped_whole(model: Any) -> nn.Module | None:
    """Return the wrapped model inside a module without parameters of its own, as of Fabric."""
    if not isinstance(model, nn.Module):
        return None
    kinds = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    wrapped = next((part for part in model.modules() if isinstance(part, kinds)), None)
    if wrapped is None or wrapped is model:
        return None
    own = {id(p) for p in model.parameters()} - {id(p) for p in wrapped.parameters()}
    return None if own else wrapped


_FOREIGN = "fairscale.nn.data_parallel"
"""Wrappers that leave a reduced gradient on one rank, or flatten parameters."""


def _check_bare(model: Any) -> None:
    """Check that nothing wraps a model, or a part of it, and that there are ranks to compare."""
    wrappers = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)
    parts = model.modules() if isinstance(model, nn.Module) else ()
    wrapped = [
        type(part).__name__
        for part in parts
        if isinstance(part, wrappers) or type(part).__module__.startswith(_FOREIGN)
    ]
    advice = "pass what the training calls, after wrapping"
    if not isinstance(model, nn.Module):
        why = f"got {type(model).__name__}"
    elif not (dist.is_available() and dist.is_initialized()):
        why = f"got {type(model).__name__} in a process without others"
        advice = "start the script with torchrun --nproc-per-node 2 or more, and wrap the model"
    elif wrapped:
        why = f"got {type(model).__name__}, of which {wrapped[0]} wraps a part"
        why = why if type(model).__name__ != wrapped[0] else f"got {wrapped[0]}"
    elif any(composable_ddp(part) is not None for part in model.modules()):
        why = f"got {type(model).__name__}, of which replicate wraps a part"
    else:
        return
    raise UnsupportedError(
        "watch() expected a model under DistributedDataParallel, replicate or fully_shard, a "
        "DeepSpeed engine, or a model without wrapper in a job of several ranks, after "
        f"init_process_group, {why}; {advice}"
    )


def _find_loop(model: nn.Module, group: dist.ProcessGroup | None) -> Wrapped:
    assert group is not None  # _check_bare looked
    if group.size() < 2:
        raise UnsupportedError(
            f"watch() expected several workers, got {type(model).__name__} without wrapper in a "
            "group of one rank, where there is nothing to compare; start the job with more ranks"
        )
    parameters = _trained_in(model)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UnsupportedError(
            "watch() expected whole parameters on every rank of a model without wrapper, got "
            "DTensor; wrap the model by fully_shard"
        )
    _check_one_device(parameters)
    device = next(iter(parameters.values()), torch.zeros(())).device
    return Wrapped(LOOP, model, parameters, group, device)


def is_training(model: nn.Module) -> bool:
    """Return whether the modules' mode makes a forward pass that begins now one of a training.

    The mode is that of the modules inside, never of a wrapper: after an evaluation, Lightning puts
    the module back into training mode, but not its wrapper.
    """
    return torch.is_grad_enabled() and in_training_mode(model)


def in_training_mode(model: nn.Module) -> bool:
    """Return whether a model trains dropout and the like, or a part of it does.

    Its own flag counts only if it wraps nothing.
    """
    wrapper = getattr(model, "_orig_mod", None) or model
    wraps = isinstance(wrapper, DistributedDataParallel)
    wraps = wraps or is_deepspeed(wrapper) or is_megatron(wrapper)
    inner: Any = wrapper.module if wraps else wrapper
    return inner.training or any(module.training for module in inner.modules())


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled: hooks inside it would break its graph."""
    in_place = getattr(model, "_compiled_call_impl", None) is not None  # Module.compile
    return in_place or "_orig_mod" in model._modules


def takes_hooks(module: nn.Module) -> bool:
    """Return whether a module's calls can be hooked; those of TorchScript cannot."""
    return not isinstance(module, torch.jit.ScriptModule)


def log_if_rewrapped(module: nn.Module, wrapper: nn.Module) -> bool:
    """Return whether a module that begins now does so in another wrapper than before; log it then.

    It was watched in ``wrapper``: DDP, or a DeepSpeed engine.
    """
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)
    others = () if running is None or running is wrapper else running.modules()
    anew = isinstance(module, FSDPModule) or any(part is module for part in others)
    if anew:
        first = not dist.is_initialized() or dist.get_rank() == 0
        level = logging.WARNING if first else logging.INFO
        _log.log(level, "the model was wrapped anew; this run ends here: watch the new wrapper")
    return anew


def composable_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP that reduces for a model under torch's composable ``replicate``, or None.

    ``replicate`` makes it in the first forward pass; it is made here if there is none yet.
    """
    try:
        from torch.distributed._composable.contract import _get_registry
        from torch.distributed._composable.replicate import replicate
    except ImportError:
        return None
    if "replicate" not in (_get_registry(model) or {}):
        return None
    state: Any = replicate.state(model)
    if not hasattr(state, "lazy_init"):
        return None  # FSDP2 carries a younger ``replicate``
    if not state.has_initialized:
        state.lazy_init()
    ddp = getattr(state, "_ddp", None)
    return ddp if isinstance(ddp, DistributedDataParallel) else None


def _find_sharded(model: nn.Module, process_group: dist.ProcessGroup | None) -> Wrapped:
    workers = () if process_group is None else ranks_of(process_group)
    parameters = fsdp2_parameters(model, workers)
    first, *others = parameters_by_mesh(model)
    chosen = any(p.name in parameters for p in first)
    if chosen:
        for other in others:
            log_other_mesh(first, other)
    return Wrapped(
        FSDP2,
        model,
        parameters,
        process_group or fsdp2_process_group(model),
        fsdp2_device(model),
        replica=fsdp2_replica(model, workers),
        mesh=_find_mesh(model) if chosen else None,
    )


def _find_mesh(model: nn.Module) -> MeshPlace | None:
    try:
        return mesh_place(model)
    except Exception as error:  # whatever the meshes of its parameters are
        _log.debug("other axes of the mesh are unknown: %r", error)
        return None


def _find_replicated(model: nn.Module, ddp: DistributedDataParallel) -> Wrapped:
    reduced = {id(parameter) for parameter in ddp.parameters()}
    parameters = {n: p for n, p in _trained_in(model).items() if id(p) in reduced}
    _check_ddp(ddp, parameters)
    device = next(ddp.parameters()).device
    return Wrapped(REPLICATE, ddp, parameters, ddp.process_group, device, replicated=model)


def _find_deepspeed(engine: Any) -> Wrapped:
    parameters = _trained_in(engine.module)
    group = deepspeed_process_group(engine)
    optimizer = engine.basic_optimizer
    replica = 0 if engine.zero_optimization_stage() < 3 else None
    return Wrapped(DEEPSPEED, engine, parameters, group, engine.device, optimizer, replica)


def _find_megatron(ddp: Any) -> Wrapped:
    group = megatron_process_group(ddp)
    parameters = megatron_parameters(ddp)
    device = ddp.buffers[0].grad_data.device
    return Wrapped(MEGATRON, ddp, parameters, group, device)


def _check_ddp(ddp: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise UnsupportedError(
            "watch() expected DDP's own reducer, got optimize_ddp='python_reducer', under which "
            "hooks see gradients that are averaged already; leave "
            "torch._dynamo.config.optimize_ddp at its default"
        )
    if ddp.mixed_precision is not None:
        raise UnsupportedError(
            "watch() expected DDP without a precision of its own, got mixed_precision, under which "
            "gradients change their type inside the backward pass; use torch.autocast"
        )
    if getattr(ddp, "_delay_all_reduce_params", ()):
        raise UnsupportedError(
            "watch() expected all gradients in DDP's buckets, got delay_all_reduce_named_params, "
            "which are reduced apart; leave it out"
        )
    _check_one_device(parameters)


def _check_one_device(parameters: dict[str, Tensor]) -> None:
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise UnsupportedError(
            "watch() expected all parameters of a worker on one device, got "
            f"{', '.join(sorted(map(str, devices)))}; a model that is split over devices cannot "
            "be watched yet"
        )


def _trained(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return _trained_in(ddp.module, ddp.parameters_to_ignore)


def _trained_in(module: nn.Module, left_out: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a module's parameters that require a gradient, by canonical name."""
    return {
        canonical_name(name): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in left_out
    }


def all_parameters(wrapped: Wrapped) -> dict[str, Tensor]:
    """Return all parameters of a watched model by canonical name, frozen ones, too.

    Under FSDP2 these are the shards, also where the model holds gathered parameters.
    """
    if wrapped.kind is FSDP2:
        meshes = parameters_by_mesh(wrapped.wrapper)
        return {p.name: p.tensor for managed in meshes for p in managed}
    return {canonical_name(name): p for name, p in wrapped.module.named_parameters()}


def reduced_types(
    wrapper: nn.Module, parameters: dict[str, Tensor], groups: Groups
) -> dict[str, str]:
    """Return for each group the type in which its gradient is meant to be reduced.

    That is the coarsest of the type in which it is added up and the one in which the result is
    kept: under DDP the parameters', under FSDP2 also its ``MixedPrecisionPolicy``'s, of a DeepSpeed
    engine also its ``communication_data_type``; under Megatron-core it is the buffers'. A
    communication hook does not count: an audit is to find its effect on the gradient.
    """
    if is_deepspeed(wrapper):
        sums = dict.fromkeys(parameters, _of_engine(wrapper))
    elif is_fsdp2(wrapper):
        sums = {p.name: p.summed_in for each in parameters_by_mesh(wrapper) for p in each}
    else:
        sums = {}
    buffered = is_megatron(wrapper)
    coarsest: dict[str, torch.dtype] = {}
    for name, parameter in parameters.items():
        group = groups.names[groups.index_of[name]]
        held = getattr(parameter, "main_grad", parameter) if buffered else parameter
        own = _real(held.dtype)
        for dtype in (own, _real(sums.get(name, own))):
            coarsest[group] = max(
                coarsest.get(group, dtype), dtype, key=lambda each: torch.finfo(each).eps
            )
    return {group: dtype_name(dtype) for group, dtype in coarsest.items()}


def _of_engine(engine: Any) -> torch.dtype:
    dtype = getattr(engine, "communication_data_type", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
