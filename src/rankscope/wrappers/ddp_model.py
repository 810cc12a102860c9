"""Models under ``DistributedDataParallel``: in one, in several, or under ``replicate``."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.errors import UnsupportedError
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.ddp import DDPTap
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.wrapped import Wrapped, WrapperKind, check_one_device, trained_in

_GROUPED_BY = "DistributedDataParallel got a process_group"
_SETTINGS = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")

DDP = WrapperKind("DDP", _GROUPED_BY, DDPTap, one_of_many=True, begins_in_parts=True, traces=True)

DDP_PARTS = WrapperKind(
    "DDP",
    _GROUPED_BY,
    DDPTap,
    in_parts=True,
    no_canary="the training calls the parts of the model one by one, each in a DDP of its own",
    no_reference="the training calls its parts one by one, each in a DDP of its own",
)
"""A model of several parts, each in a DDP of its own."""

REPLICATE = WrapperKind(
    "replicate",
    _GROUPED_BY,
    DDPTap,
    runs_apart=False,
    no_canary="replicate() reduces in hooks of the model itself, so no worker can run it alone",
)


@dataclass(frozen=True, slots=True)
class DDPModel(Wrapped):
    """A model in DDP; of several parts, ``wrapper`` is that of the first one.

    Its forward pass begins a micro-batch.
    """

    @property
    def ddps(self) -> Sequence[DistributedDataParallel]:
        """The wrappers, one for each part."""
        parts = self.inside
        return parts.wrappers if isinstance(parts, JointModel) else [self.wrapper]

    def reduces(self) -> Callable[[Tensor], bool] | None:
        """Return a test whether DDP reduces a parameter's gradient; None if it reduces all.

        DDP does not reduce a parameter that was frozen when it was wrapped, and keeps no list of
        those: the present flag counts. One that it reduces all the same is equal on all workers,
        and makes no finding.
        """
        lists: list[Any] = [getattr(each, "_module_parameters", None) for each in self.ddps]
        if any(parameters is None for parameters in lists):
            return None
        reduced = {id(p) for parameters in lists for p in parameters or () if p.requires_grad}
        return lambda parameter: id(parameter) in reduced

    def left_out(self) -> frozenset[str]:
        """Return the canonical names of the parameters that DDP ignores."""
        if isinstance(self.inside, JointModel):
            return self.inside.left_out()
        if self.inside is None:
            return frozenset(self.wrapper.parameters_to_ignore)
        wrapped = {id(parameter) for parameter in self.wrapper.parameters()}
        named = self.inside.named_parameters()
        return frozenset(canonical_name(name) for name, p in named if id(p) not in wrapped)

    def broadcasts(self) -> Callable[[], bool] | None:
        """Return a test whether DDP broadcasts buffers before a forward pass; None if never.

        None also where a hook of the user's does it, at an unknown time.
        """
        ddp = self.wrapper
        if self.kind is REPLICATE:
            return None
        broadcasts = getattr(ddp, "forward_sync_buffers", None)  # its later name
        if not (ddp.broadcast_buffers if broadcasts is None else broadcasts):
            return None
        return None if hasattr(ddp, "buffer_hook") else ddp.will_sync_module_buffers

    def settings(self) -> Mapping[str, object]:
        """Return DDP's settings, and the name of its communication hook."""
        ddp = self.wrapper
        return {
            **{name: bool(getattr(ddp, name)) for name in _SETTINGS},
            "bucket_bytes": int(ddp.bucket_bytes_cap),
            "hook": communication_hook(ddp),
        }


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


def is_ddp(model: object) -> TypeGuard[DistributedDataParallel]:
    """Return whether a model is in DDP."""
    return isinstance(model, DistributedDataParallel)


def find_ddp(ddp: Any, process_group: object = None) -> Wrapped:
    """Return a model in DDP."""
    return _found(DDP, ddp, _trained(ddp))


def find_joint(models: Sequence[nn.Module]) -> Wrapped:
    """Return several models, each in a DDP of its own, as one."""
    wrappers = [getattr(model, "_orig_mod", model) for model in models]
    ddps = [each for each in wrappers if isinstance(each, DistributedDataParallel)]
    others = [type(each).__name__ for each in wrappers if each not in ddps]
    if others or not ddps:
        raise UnsupportedError(
            "watch() expected several models to be in a DistributedDataParallel each, got "
            f"{others[0] if others else 'none'}; watch one model"
        )
    ranks = [set(ranks_of(each.process_group)) for each in ddps]
    if any(each != ranks[0] for each in ranks):
        raise UnsupportedError(
            "watch() expected the same ranks in all DistributedDataParallel of a training, got "
            "process groups of different ones; watch one model"
        )
    parts = JointModel(ddps)
    parameters = parts.trained()
    for each in ddps[1:]:
        _check(each, parameters)
    return _found(DDP_PARTS, ddps[0], parameters, parts)


def composable_ddp(model: Any) -> DistributedDataParallel | None:
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


def is_replicated(model: Any) -> bool:
    """Return whether a model is under torch's composable ``replicate``."""
    return composable_ddp(model) is not None


def find_replicated(model: nn.Module, process_group: object = None) -> Wrapped:
    """Return a model under ``replicate``."""
    ddp = composable_ddp(model)
    assert ddp is not None
    reduced = {id(parameter) for parameter in ddp.parameters()}
    parameters = {n: p for n, p in trained_in(model).items() if id(p) in reduced}
    return _found(REPLICATE, ddp, parameters, model)


def _found(
    kind: WrapperKind,
    ddp: DistributedDataParallel,
    parameters: dict[str, Tensor],
    inside: nn.Module | None = None,
) -> Wrapped:
    _check(ddp, parameters)
    device = next(iter(parameters.values()), next(ddp.parameters())).device
    return DDPModel(kind, ddp, parameters, ddp.process_group, device, inside=inside)


def _check(ddp: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
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
    check_one_device(parameters)


def _trained(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return trained_in(ddp.module, ddp.parameters_to_ignore)


def communication_hook(wrapper: object) -> str | None:
    """Return the name of DDP's communication hook; None without one, or in another wrapper."""
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    named = [hook if hasattr(hook, "__qualname__") else type(hook) for hook in hooks]
    names = [f"{each.__module__}.{each.__qualname__}" for each in named]
    log: Mapping[str, Any] = getattr(wrapper, "_get_ddp_logging_data", dict)()
    return ", ".join(names) or str(log.get("comm_hook") or "") or None
