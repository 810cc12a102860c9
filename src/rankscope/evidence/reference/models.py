"""Models in a reference step: how each worker can run one alone, and where its gradient lies.

Of a model that FSDP2 or ZeRO 3 shards, a plain copy with whole parameters runs, which all workers
gather. Its modules have the classes from before ``fully_shard``, without the hooks of FSDP2 and of
tensor parallelism: FSDP2's own state stays untouched, and nothing communicates. Attributes are
copied where possible; the others, and random generators, are shared. The copy casts parameters,
inputs and outputs like FSDP2.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from rankscope.bus.groups import Groups
from rankscope.bus.words import shortened
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import check_gradient_room, check_room
from rankscope.evidence.canary.layout import layout_of, whole_of
from rankscope.evidence.canary.replay import check_module
from rankscope.evidence.randomness.probe import KINDS
from rankscope.evidence.reference.micro_batch import Gradients, coarser
from rankscope.evidence.reference.tensor_parallel import TensorParallel, along, find_tensor_parallel
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.names import canonical_name
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.private import lacking
from rankscope.wrappers.calls import ForeignHook
from rankscope.wrappers.ddp_model import communication_hook
from rankscope.wrappers.deepspeed import engine_types
from rankscope.wrappers.deepspeed_reading import ReducedReader
from rankscope.wrappers.fsdp2_model import (
    ManagedParameter,
    casting_policy,
    managed_parameters,
    measure_shards,
    parameters_by_mesh,
)
from rankscope.wrappers.wrapped import Wrapped, is_compiled, reduced_types

_SHARDERS = ("torch.distributed.", "deepspeed.")
"""Modules whose hooks are left out of a copy."""

_MADE_BY = ("torch.distributed.fsdp", "torch.distributed._composable")
"""Modules of the base classes that replace a module's own class."""


_SENT_IN = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}
"""Types in which communication hooks of torch reduce, by their names in small letters."""

_CHANGE_MORE = ("powerSGD_hook", "quantization")
"""Names of those that lose more."""


class WholeModel:
    """A model that each worker holds, as under DDP."""

    summed_workers = 1.0  # the reduced gradient over the workers' mean: 1 for a mean, W for a sum
    tensor_parallel: TensorParallel | None = None  # along which ranks share its parameters

    def __init__(
        self,
        module: nn.Module,
        num_workers: int,
        held: Collection[str] | None = None,
        *,
        in_shares: bool = False,
    ) -> None:
        named = [(canonical_name(n), p) for n, p in module.named_parameters() if p.requires_grad]
        if held is not None and not in_shares:
            named = [(name, parameter) for name, parameter in named if name in held]
        self.names = tuple(name for name, _ in named)  # of the trained parameters ``[P]``
        # the coarser of the types in which each gradient is accumulated and stored ``[P]``
        self.types = tuple(str(p.dtype).removeprefix("torch.") for _, p in named)
        # that hold each element of the reduced gradient
        self.copies = 1 if in_shares else num_workers
        self._module = module
        self._parameters = [parameter for _, parameter in named]
        self._held = held  # parameters that this worker's optimizer holds; None for all

    def round_in(self, dtype: torch.dtype) -> None:
        """Allow for a reduction in this type."""
        kinds = [coarser(getattr(torch, name), dtype) for name in self.types]
        self.types = tuple(str(kind).removeprefix("torch.") for kind in kinds)

    def check(self) -> None:
        """Check that a worker can run the model alone, and that gradients can be read."""
        check_module(self._module)
        check_gradient_room(self._parameters, self._parameters[0].device)

    def digests(self) -> dict[str, int]:
        """Return digests of parameters that healthy workers hold alike; waits for the device."""
        return {name: int(digest_tensor(p)) for name, p in self._module.named_parameters()}

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure this worker's part of the reduced gradient."""
        held = self._held
        pairs = zip(self.names, self._parameters, strict=True)
        gradients = [p.grad if held is None or name in held else None for name, p in pairs]
        if all(p.grad is None for p in self._parameters):
            raise CanaryDeclined("the gradients were taken away before the optimizer's call")
        measure_gradients(sketcher, self.names, gradients, into)

    @contextmanager
    def plain(self) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
        """Yield the module to run alone, and its trained parameters in the order of ``names``."""
        yield self._module, self._parameters


@torch.no_grad()
def measure_gradients(
    sketcher: Sketcher, names: Sequence[str], gradients: Gradients, into: GradientTotals
) -> None:
    """Measure those of some parameters' gradients that are there."""
    here = [(n, g) for n, g in zip(names, gradients, strict=True) if g is not None]
    sketcher.measure_many([(name, gradient.detach(), 0) for name, gradient in here], into)


class ShardedModel:
    """A model under FSDP2, for a reference step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        managed = {p.name: p for p in managed_parameters(model)}
        self._trained = [p for p in managed.values() if p.tensor.requires_grad]
        self.names = tuple(p.name for p in self._trained)
        types = [coarser(p.summed_in, p.tensor.dtype) for p in self._trained]
        self.types = tuple(str(kind).removeprefix("torch.") for kind in types)
        self.copies = self._trained[0].group.num_copies
        self.tensor_parallel = find_tensor_parallel(managed)
        self._managed = managed

    @property
    def summed_workers(self) -> float:
        """The reduced gradient over the workers' mean gradient: 1 for a mean, W for a sum."""
        return 1 / self._trained[0].group.reduced_scale

    def check(self) -> None:
        """Check that a whole copy can be made and run."""
        _check_gathering(self._model, list(self._managed.values()))

    def digests(self) -> dict[str, int]:
        """Return nothing: workers hold other shards."""
        return {}

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure this worker's shards of ``.grad``."""
        shards = [(p.name, p.reduced, p.place) for p in self._trained]
        measure_shards(sketcher, [(n, g, at) for n, g, at in shards if g is not None], into)

    @contextmanager
    def plain(self) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
        """Yield a plain copy, and its trained parameters in the order of ``names``.

        All workers gather the whole parameters.
        """
        shared = self.tensor_parallel
        whole: dict[str, nn.Parameter] = {}
        memo: dict[int, Any] = {}  # replacements, by the id of the original
        for name, managed in self._managed.items():
            sharded = managed.tensor
            own = whole_of(sharded.detach())
            dtype = managed.computed_in
            full = own if shared is None else shared.middle_of(name, own)
            whole[name] = nn.Parameter(full.to(dtype), requires_grad=sharded.requires_grad)
            memo[id(sharded)] = whole[name]
            if shared is not None and not torch.equal(full, own):
                shared.replicas[whole[name]] = own.to(dtype)
        memo |= _whole_buffers(self._model)
        try:
            yield plain_copy(self._model, memo), [whole[name] for name in self.names]
        finally:
            if shared is not None:
                shared.replicas.clear()


ReferenceModel = WholeModel | ShardedModel


class GatheredModel:
    """A model under FSDP2 that all ranks of the job can run together, for directional derivatives.

    Its parameters are gathered over the ranks that average gradients; along a tensor-parallel axis
    each rank keeps its part, as the training's forward pass has it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._managed = managed_parameters(model)
        self.parameters = {p.name: p.tensor for p in self._managed if p.tensor.requires_grad}

    def check(self) -> None:
        """Check that a copy can be made and run."""
        _check_gathering(self._model, self._managed)
        if all(tensor.grad is None for tensor in self.parameters.values()):
            raise CanaryDeclined("its parameters have no gradients")

    @contextmanager
    def opened(self) -> Iterator[tuple[nn.Module, list[Tensor], list[Tensor | None]]]:
        """Yield a copy, the memory of its trained parameters, and their gradients."""
        memo: dict[int, Any] = {}
        own: dict[str, Tensor] = {}
        gradients: list[Tensor | None] = []
        for managed in self._managed:
            sharded: Any = managed.tensor
            part = _gathered(managed, sharded.detach()).to(managed.computed_in)
            placed = part
            if managed.is_dtensor:
                axis, placement = along(managed)
                mesh = sharded.device_mesh[axis]
                placed = DTensor.from_local(
                    part, mesh, (placement,), shape=sharded.shape, stride=sharded.stride()
                )
            memo[id(sharded)] = nn.Parameter(placed, requires_grad=sharded.requires_grad)
            if sharded.requires_grad:
                own[managed.name] = part
                gradients.append(None if sharded.grad is None else _gathered(managed, sharded.grad))
        memo |= _whole_buffers(self._model)
        yield plain_copy(self._model, memo, _MADE_BY), list(own.values()), gradients


def _check_gathering(model: nn.Module, managed: Sequence[ManagedParameter]) -> None:
    """Check that all ranks can gather a model under FSDP2, and have room for it."""
    if len(parameters_by_mesh(model)) > 1:
        raise CanaryDeclined("experts lie on another mesh than the rest")
    if any(p.tensor.device != p.group.device for p in managed):
        raise CanaryDeclined("parameters are offloaded")
    names = {p.name for p in managed}  # the model may hold gathered parameters
    named = [(canonical_name(name), p) for name, p in model.named_parameters()]
    alone = [name for name, p in named if p.requires_grad and name not in names]
    if alone:
        raise CanaryDeclined(f"no wrapper reduces the gradients of {shortened(alone, 3)}")
    if any(p.group.half_reduced for p in managed if p.tensor.requires_grad):
        raise CanaryDeclined("a part of the gradients waits for its all-reduce")
    needed = 3 * sum(p.tensor.numel() * p.tensor.element_size() for p in managed)
    check_room(needed, managed[0].group.device, "the whole model and its gradient")


def _whole_buffers(model: nn.Module) -> dict[int, Tensor]:
    """Return whole copies of the buffers that ranks share, by the id of the original."""
    return {id(b): whole_of(b.detach()).clone() for b in model.buffers() if layout_of(b)}


def _gathered(managed: ManagedParameter, tensor: Any) -> Tensor:
    """Return a tensor gathered over all axes but the tensor-parallel one; all ranks call it."""
    axis = along(managed)[0] if managed.is_dtensor else None
    names = tensor.device_mesh.mesh_dim_names
    placements = list(tensor.placements)
    for at in range(len(placements)):
        if axis is None or names[at] != axis:
            placements[at] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    found: Tensor = tensor.to_local()
    return found.clone()


class ReplicatedModel(WholeModel):
    """A model under ``replicate``, whose own hooks reduce gradients."""

    @contextmanager
    def plain(self) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
        """Yield a plain copy with the same parameters."""
        memo: dict[int, Any] = {id(p): p for p in self._module.parameters()}
        yield plain_copy(self._module, memo), self._parameters


def plain_copy(
    model: nn.Module, memo: dict[int, Any], sharders: tuple[str, ...] = _SHARDERS
) -> nn.Module:
    """Return a copy of a module tree without the hooks of ``sharders``.

    ``memo`` holds the replacements of its parameters, by their ids; modules are added to it.
    """
    copies = {module: _shell(module) for module in model.modules()}
    memo |= {id(module): shell for module, shell in copies.items()}
    for module, shell in copies.items():
        for name, value in vars(module).items():
            hooks = isinstance(value, OrderedDict) and name.endswith("hooks")
            if hooks:  # those of sharders and of the monitor are left out
                own = [(k, hook) for k, hook in value.items() if not _is_foreign(hook, sharders)]
                vars(shell)[name] = OrderedDict(own)
            else:
                vars(shell)[name] = _copied(value, memo)
        _cast_as(module, shell)
    return copies[model]


def _shell(module: nn.Module) -> nn.Module:
    """Return an empty object of the class that a module had before it was sharded."""
    kind: Any = next(  # neither a class that replaces a module's own, nor a base of one that does
        each
        for each in type(module).__mro__
        if not any(base.__module__.startswith(_MADE_BY) for base in each.__mro__)
    )
    shell: nn.Module = object.__new__(kind)
    return shell


def _is_foreign(hook: Any, sharders: tuple[str, ...]) -> bool:
    owner = getattr(hook, "__self__", hook)
    places = (getattr(hook, "__module__", ""), type(owner).__module__)
    return isinstance(hook, ForeignHook) or any(str(p).startswith(sharders) for p in places)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a module's attribute, or the same object if it cannot be copied."""
    theirs = type(value).__module__.startswith("deepspeed.")
    if type(value) is dict or (theirs and isinstance(value, dict)):  # parameters, buffers, modules
        return {key: _copied(part, memo) for key, part in value.items()}
    if isinstance(value, KINDS):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def _cast_as(module: nn.Module, shell: nn.Module) -> None:
    """Let a copy cast its inputs and outputs as FSDP2 does in the module."""
    if not isinstance(module, FSDPModule):
        return
    policy = casting_policy(module)
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        into = policy.param_dtype
        shell.register_forward_pre_hook(
            lambda _, args, kwargs: (_cast(args, into), _cast(kwargs, into)),
            prepend=True,
            with_kwargs=True,
        )
    if policy.output_dtype is not None:
        out = policy.output_dtype
        shell.register_forward_hook(lambda _, args, output: _cast(output, out))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return nested values with their floating-point tensors cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        found = copy.copy(value)
        for key, part in value.items():
            found[key] = _cast(part, dtype)
        return found
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(part, dtype) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(part, dtype) for part in value)
    return value


class EngineModel(WholeModel):
    """A model in a DeepSpeed engine."""

    def __init__(self, engine: Any, num_workers: int) -> None:
        super().__init__(engine.module, num_workers)
        self._engine = engine
        parameters: dict[str, Tensor] = dict(zip(self.names, self._parameters, strict=True))
        groups = Groups(self.names, {name: at for at, name in enumerate(self.names)})
        types = reduced_types(engine_types(engine, parameters), groups)
        self.types = tuple(types[name] for name in self.names)
        self._sharded = engine.zero_optimization_stage() == 3
        self._shards = ReducedReader(engine, parameters)
        self.copies = num_workers if self._shards.replicated else 1

    def check(self) -> None:
        """Check that a worker can run the model alone, and that gradients can be read."""
        super().check()
        if not self._shards.available:
            raise CanaryDeclined(
                "the reduced gradient has left the device, or is an update already"
            )
        if float(loss_scale(self._engine)) != 1:
            raise CanaryDeclined("the engine scales its loss, as it does in fp16")

        if self._sharded:
            every = [p for p in self._engine.module.parameters() if hasattr(p, "ds_numel")]
            needed = 3 * sum(p.ds_numel * p.element_size() for p in every)
            check_room(needed, self._engine.device, "the whole model and its gradient")

    @contextmanager
    def plain(self) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
        """Yield the model itself or, under ZeRO 3, a plain copy with whole parameters."""
        if not self._sharded:
            with super().plain() as given:
                yield given
            return
        every = list(self._engine.module.parameters())
        zero: Any = sys.modules["deepspeed"].zero
        with zero.GatheredParameters(every):
            whole = {
                id(p): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                for p in every
            }
        trained = [whole[id(parameter)] for parameter in self._parameters]
        yield plain_copy(self._engine.module, dict(whole)), trained

    def digests(self) -> dict[str, int]:
        """Return digests of all parameters; under ZeRO 3 nothing, since workers hold parts."""
        return {} if self._sharded else super().digests()

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure this worker's part of the reduced gradient."""
        sketcher.measure_many(list(self._shards.shards()), into)


def loss_scale(engine: Any) -> Tensor:
    """Return DeepSpeed's factor on a loss, without the division by accumulation steps."""
    with torch.enable_grad():
        one = torch.ones((), device=engine.device, dtype=torch.float32, requires_grad=True)
        loss = one.clone()
        if hasattr(engine.optimizer, "scale_if_loss"):
            loss = engine.optimizer.scale_if_loss(loss)
        elif engine.torch_autocast_z0_gradscaler:
            loss = engine.torch_autocast_z0_gradscaler.scale(loss)
    return loss.detach()


def reference_model(wrapped: Wrapped) -> ReferenceModel:
    """Return the model that a worker runs alone; CanaryDeclined if it cannot."""
    size = wrapped.group.size()
    if wrapped.kind.engine:
        return EngineModel(wrapped.wrapper, size)
    if wrapped.sharded:
        return _sharded(wrapped)
    kind = WholeModel if wrapped.kind.runs_apart else ReplicatedModel
    model = kind(wrapped.module, size, wrapped.held, in_shares=wrapped.in_shares)
    hook = communication_hook(wrapped.wrapper) or ""
    sent = [dtype for name, dtype in _SENT_IN.items() if name in hook.lower()]
    for dtype in sent:
        model.round_in(dtype)
    return model


def _sharded(wrapped: Wrapped) -> ShardedModel:
    """Return a model under FSDP2."""
    model = ShardedModel(wrapped.wrapper)
    axes = {} if wrapped.mesh is None else wrapped.mesh.axes
    shared = model.tensor_parallel
    if shared is not None and len(shared.ranks) > 1 and axes.get(shared.name) != shared.ranks:
        raise CanaryDeclined(f"which ranks share its parameters along {shared.name} is not known")
    others = [axis for axis in axes if shared is None or axis != shared.name]
    if others:
        raise CanaryDeclined(
            f"along {' and '.join(others)}, an axis of the mesh that shards no parameter, ranks "
            "may have parts of a batch, which no worker could run alone"
        )
    return model


def why_no_reference(wrapped: Wrapped) -> str:
    """Return why no gradient of a model can be computed again; empty if it can."""
    if any(kind.__name__ == "LightningModule" for kind in type(wrapped.module).__mro__):
        return "Lightning runs training_step in place of the forward pass, with all that it logs"
    if wrapped.kind.no_reference:
        return wrapped.kind.no_reference
    hook = communication_hook(wrapped.wrapper) or ""
    if any(name in hook for name in _CHANGE_MORE):
        return f"its communication hook, {hook}, changes gradients by more than rounding"
    if any(map(is_compiled, wrapped.wrapper.modules())):
        return "the model is compiled, and would run by other operations"
    missing = lacking("canary")
    return f"torch lacks {', '.join(missing)}" if missing else ""
