"""What the monitor asks of a wrapper: facts of its kind, and the model that it wraps.

A wrapper's module has its :class:`WrapperKind` with its tap, and a function that finds it, which
:mod:`rankscope.wrappers.find` lists; where it differs in more, a subclass of :class:`Wrapped`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.bus.groups import Groups
from rankscope.bus.words import dtype_name
from rankscope.errors import UnsupportedError
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.tap import GradientTap, TapPlan


@dataclass(frozen=True, slots=True)
class WrapperKind:
    """A way in which a model goes data parallel; the defaults are those of most wrappers."""

    name: str  # in messages and in the record
    grouped_by: str  # what decides which ranks reduce together, as a sentence's beginning
    tap: "Callable[[Wrapped, TapPlan], GradientTap]"  # returns one of a model's local gradients
    by_loop: bool = False  # the training reduces by itself, and its optimizer's call ends a step
    engine: bool = False  # the wrapper's own call steps its optimizer
    own_optimizer: bool = True  # the training's optimizer holds the model's parameters themselves
    updates_at_once: bool = True  # each worker has the new parameters when ``step`` returns
    in_parts: bool = False  # the training calls several parts, each in a wrapper of its own
    one_of_many: bool = False  # several of them, around a part each, make one training
    begins_in_parts: bool = False  # calls of the module's parts or methods may begin a step
    traces: bool = False  # rank 0 holds whole parameters and gradients, and can keep a trace
    runs_apart: bool = True  # its module can be called without a reduction
    no_canary: str = ""  # why a worker cannot run its model without the others; empty if it can
    no_reference: str = ""  # why a step's gradient cannot be computed again; empty if it can

    def __str__(self) -> str:
        return self.name


def no_whole(name: str) -> str:
    """Return why there is no canary under a wrapper that shards parameters."""
    return f"a canary runs the whole model on each worker alone, which under {name} no worker holds"


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A data-parallel model as it was found; a wrapper's subclass has what else is its own."""

    kind: WrapperKind
    wrapper: Any
    """The module that reduces gradients; under ``replicate``, the DDP that hooks of the model call;
    the model itself where nothing wraps it."""
    parameters: dict[str, Tensor]  # that require a gradient, by canonical name
    group: dist.ProcessGroup  # whose ranks are compared; each of them is a worker
    device: torch.device  # of the gradients
    optimizer: torch.optim.Optimizer | None = None  # where the wrapper holds it
    sharded: bool = False  # workers hold parts of parameters, and gather them from each other
    replica: int | None = 0  # equal on workers of the same parameters; None: each has one owner
    mesh: Any = None  # this rank's ``MeshPlace`` beside the data-parallel axes
    inside: nn.Module | None = None  # the model, where it is not the wrapper's ``module``
    held: frozenset[str] | None = None
    """The parameters in this rank's optimizer, where a loop reduces gradients and it holds some or
    none; None if it holds all, or some with other tensors."""
    in_shares: bool = False  # each of the others is in the optimizer of one other rank, or in none
    # names of parameters whose gradients other ranks sum with these; it may grow, by a loop's tap
    summed: set[str] = field(default_factory=set)

    @property
    def module(self) -> nn.Module:
        """The model inside the wrapper; the same where a layer may be called so."""
        inner = getattr(self.wrapper, "module", None) if self.inside is None else self.inside
        return inner if isinstance(inner, nn.Module) else self.wrapper

    def every_parameter(self) -> dict[str, Tensor]:
        """Return all parameters by canonical name, frozen ones, too."""
        return {canonical_name(name): p for name, p in self.module.named_parameters()}

    def reduces(self) -> Callable[[Tensor], bool] | None:
        """Return a test whether a parameter's gradient is reduced; None if all are."""
        return None

    def left_out(self) -> frozenset[str]:
        """Return the canonical names of the parameters that the wrapper ignores."""
        return frozenset()

    def broadcasts(self) -> Callable[[], bool] | None:
        """Return a test whether buffers are broadcast before a forward pass; None if never."""
        return None

    def lookup(self) -> Callable[[nn.Module, str], Tensor | None] | None:
        """Return how to find the shard of a parameter in a module; None without shards."""
        return None

    def settings(self) -> Mapping[str, object]:
        """Return the settings of the reduction by name."""
        return {}

    def gradient_types(self) -> Mapping[str, Collection[torch.dtype]]:
        """Return by parameter the types in which its gradient is meant to be added up and kept."""
        return {name: [parameter.dtype] for name, parameter in self.parameters.items()}

    def make_tap(self, plan: TapPlan) -> GradientTap:
        """Return a tap that reads this model's local gradients from now on."""
        return self.kind.tap(self, plan)


def reduced_types(types: Mapping[str, Collection[torch.dtype]], groups: Groups) -> dict[str, str]:
    """Return for each group the coarsest type in which a gradient of it is meant to be reduced.

    ``types`` are as of :meth:`Wrapped.gradient_types`. A communication hook does not count: an
    audit is to find its effect on the gradient.
    """
    coarsest: dict[str, torch.dtype] = {}
    for name, each in types.items():
        group = groups.names[groups.index_of[name]]
        known = [coarsest[group]] if group in coarsest else []
        real = [dtype.to_real() if dtype.is_complex else dtype for dtype in each]
        coarsest[group] = max([*known, *real], key=lambda dtype: torch.finfo(dtype).eps)
    return {group: dtype_name(dtype) for group, dtype in coarsest.items()}


def trained_in(module: nn.Module, left_out: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a module's parameters that require a gradient, by canonical name."""
    return {
        canonical_name(name): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in left_out
    }


def check_one_device(parameters: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedError for a model that is split over devices."""
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise UnsupportedError(
            "watch() expected all parameters of a worker on one device, got "
            f"{', '.join(sorted(map(str, devices)))}; a model that is split over devices cannot "
            "be watched yet"
        )


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled: hooks inside it would break its graph."""
    in_place = getattr(model, "_compiled_call_impl", None) is not None  # Module.compile
    return in_place or "_orig_mod" in model._modules


def takes_hooks(module: nn.Module) -> bool:
    """Return whether a module's calls can be hooked; those of TorchScript cannot."""
    return not isinstance(module, torch.jit.ScriptModule)
