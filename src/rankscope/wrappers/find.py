"""How a model goes data parallel: its wrapper, and the ranks to compare.

In a job of several ranks a model without wrapper counts as well: its loop, or its optimizer,
reduces.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from rankscope.errors import UnsupportedError
from rankscope.wrappers.ddp_model import (
    composable_ddp,
    find_ddp,
    find_joint,
    find_replicated,
    is_ddp,
    is_replicated,
)
from rankscope.wrappers.deepspeed import engine_class, find_deepspeed, is_deepspeed
from rankscope.wrappers.fsdp2 import find_fsdp2
from rankscope.wrappers.fsdp2_model import is_fsdp2
from rankscope.wrappers.living import REDUCING, WRAPPING
from rankscope.wrappers.loop import find_loop
from rankscope.wrappers.megatron import find_megatron, is_megatron
from rankscope.wrappers.wrapped import Wrapped

_log = logging.getLogger("rankscope")

Group = dist.ProcessGroup | None


def _is_fsdp1(model: object) -> bool:
    return isinstance(model, FullyShardedDataParallel)


def _refuse_fsdp1(model: object, process_group: Group) -> Wrapped:
    raise UnsupportedError(
        "watch() expected DDP or FSDP2, got FSDP1, whose flat parameters hide the local "
        "gradient of a layer; move to torch.distributed.fsdp.fully_shard"
    )


class _Wrapper(NamedTuple):
    """A wrapper that may be found."""

    has: Callable[[Any], bool]  # returns whether it wraps a model
    find: Callable[[Any, Group], Wrapped]
    around: bool = False  # it is a module around the model, which it holds as ``module``


_WRAPPERS = (
    _Wrapper(is_ddp, find_ddp, around=True),
    _Wrapper(is_replicated, find_replicated),
    _Wrapper(_is_fsdp1, _refuse_fsdp1),
    _Wrapper(is_deepspeed, find_deepspeed, around=True),
    _Wrapper(is_fsdp2, find_fsdp2),
    _Wrapper(is_megatron, find_megatron, around=True),
)
"""All of them; the first that a model has counts."""


def watchable_classes() -> list[type[Any]]:
    """Return the classes of wrappers that can be watched; never imports DeepSpeed."""
    engine = engine_class()
    return [DistributedDataParallel, FSDPModule, *([engine] if engine else [])]


_FOREIGN = "fairscale.nn.data_parallel"
"""Wrappers that leave a reduced gradient on one rank, or flatten parameters."""


def find_parts(models: Sequence[nn.Module]) -> Wrapped:
    """Return how the parts of a training are wrapped, each in a DDP of its own.

    The first one's forward pass begins a micro-batch.
    """
    return find_wrapper(models[0]) if len(models) == 1 else find_joint(models)


def find_wrapper(model: nn.Module, process_group: Group = None) -> Wrapped:
    """Return how a model is wrapped, as the training calls it, compiled or not.

    ``process_group`` has the workers of a model without wrapper, None for all ranks; under FSDP2
    those of one of its meshes, None for the largest. UnsupportedError where none can be watched.
    """
    inner = getattr(model, "_orig_mod", model)  # torch.compile around the wrapper
    for wrapper in _WRAPPERS:
        if wrapper.has(inner):
            return wrapper.find(inner, process_group)
    whole = _wrapped_whole(inner)
    if whole is not None:
        return find_wrapper(whole, process_group)
    _check_bare(inner)
    group = process_group or dist.group.WORLD
    assert group is not None  # _check_bare looked
    return find_loop(inner, group)


def _wrapped_whole(model: Any) -> nn.Module | None:
    """Return the wrapped model inside a module without parameters of its own, as of Fabric."""
    if not isinstance(model, nn.Module):
        return None
    wrapped = next((part for part in model.modules() if isinstance(part, REDUCING)), None)
    if wrapped is None or wrapped is model:
        return None
    own = {id(p) for p in model.parameters()} - {id(p) for p in wrapped.parameters()}
    return None if own else wrapped


def _check_bare(model: Any) -> None:
    """Check that nothing wraps a model, or a part of it, and that there are ranks to compare."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    wrapped = [
        type(part).__name__
        for part in parts
        if isinstance(part, WRAPPING) or type(part).__module__.startswith(_FOREIGN)
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
    inner: Any = getattr(model, "_orig_mod", None) or model
    if any(wrapper.around and wrapper.has(inner) for wrapper in _WRAPPERS):
        inner = inner.module
    return any(module.training for module in inner.modules())


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
