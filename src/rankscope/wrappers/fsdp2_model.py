"""The parameters of a model under FSDP2: their names, their workers, and FSDP2's state of them.

All attributes of FSDP2's own objects that the monitor uses are read here, after a check that they
exist.

FSDP2 offers no public place where the local gradient can be read in every layout: the public
``set_custom_reduce_scatter`` is never called with a shard size of 1, replaces the user's own, and
shows padded gradients, in fp16 already divided. :func:`listen` listens to a few private functions
that serve all layouts.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rankscope.errors import UnsupportedError
from rankscope.gradients.names import canonical_name
from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.private import find
from rankscope.wrappers.calls import Listener, Relay
from rankscope.wrappers.ranks import local_of, ranks_of

_GROUP_ATTRIBUTES = (
    *("fsdp_params", "mesh_info", "device", "reduce_grads", "all_reduce_grads"),
    *("gradient_divide_factor", "_all_reduce_hook", "_partial_reduce_output"),
)
_PARAMETER_ATTRIBUTES = (
    *("sharded_param", "unsharded_accumulated_grad", "is_dtensor", "fsdp_placement"),
    *("_orig_size", "padded_sharded_param_size", "mesh_info"),
)
_STATE = find("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState")
_GROUPS = find("torch.distributed.fsdp._fully_shard._fsdp_param_group")
_BEGIN = Relay(_STATE, "_register_root_post_backward_final_callback")
_REDUCE = Relay(_GROUPS, "foreach_reduce")
_END = Relay(_STATE, "_root_post_backward_final_callback")
_FINALIZE = Relay(_STATE, "_end_backward_iteration")  # since torch 2.15
_LONG_RUN = 1 << 14
_SCRATCH_ELEMENTS = 1 << 20


def listen(
    *,
    backward_begins: Listener,  # takes a state of FSDP2 that a backward pass has reached
    before_reduce: Listener,  # takes each group of parameters that is about to be reduced
    backward_ends: Listener,  # takes a state of FSDP2 whose backward pass has ended, not raised
    finalized: Listener,  # takes a state of FSDP2 for whose reductions the stream waits by now
) -> list[Callable[[], object]]:
    """Call bound methods at backward passes and reductions; return functions that end the calls.

    It does not keep their object alive. While nobody listens, torch's own functions are in place.

    Before torch 2.15, the current stream waits for all reductions of the pass at ``backward_ends``.
    ``finalized`` comes before that, but where a training waits for the reductions later
    (``set_manual_backward_finalization``), as pipeline schedules do.
    """
    expect(_STATE, "_register_root_post_backward_final_callback")
    expect(_GROUPS, "foreach_reduce")
    expect(_STATE, "_root_post_backward_final_callback")
    return [
        _BEGIN.subscribe(after=backward_begins),
        _REDUCE.subscribe(before=before_reduce),
        _END.subscribe(after=backward_ends),
        _FINALIZE.subscribe(after=finalized),
    ]


def expect(owner: Any, *names: str) -> None:
    """Check that an object of FSDP2 has the attributes that the monitor uses."""
    for name in names:
        if not hasattr(owner, name):
            named = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
            raise UnsupportedError(
                f"watching FSDP2 expected {named.__name__}.{name} in torch, which torch "
                f"{torch.__version__} lacks; use another release of torch or of rankscope"
            )


class ParameterGroup:
    """The parameters that FSDP2 gathers and reduces together.

    ``inside`` is FSDP2's own object, ``state`` its state of the module that holds them.
    """

    def __init__(self, inside: Any, state: Any) -> None:
        expect(inside, *_GROUP_ATTRIBUTES)
        expect(state, "_state_ctx")
        self._inside = inside
        self._state = state
        self.device: torch.device = inside.device
        info = inside.mesh_info
        self.mesh: DeviceMesh = info.mesh
        self.shard_size = int(getattr(info, "shard_mesh_size", 1))
        self.num_copies = int(getattr(info, "replicate_mesh_size", 1))
        self.replica: int | None = (
            None  # the number of this rank's shard; None: each parameter has one owner
        )
        if self.num_copies > 1:
            self.replica = int(getattr(info, "shard_mesh_rank", 0))
        self.shard_group: dist.ProcessGroup | None = getattr(info, "shard_process_group", None)
        self.replicate_group: dist.ProcessGroup | None = getattr(
            info, "replicate_process_group", None
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The mesh's ranks; after the end of the process group, a part of a mesh has none."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks of the job that hold the same shards as this one, and reduce them together."""
        group = self.replicate_group
        return (dist.get_rank(),) if group is None else tuple(ranks_of(group))

    @property
    def reduces(self) -> bool:
        """Whether a backward pass that ends now has reduced its gradients, if it has made any.

        Under HSDP perhaps over the shards alone.
        """
        return bool(self._inside.reduce_grads)

    @property
    def synchronises(self) -> bool:
        """Whether it has reduced that over all workers."""
        all_reduces = self.replicate_group is None or self._inside.all_reduce_grads
        return bool(self.reduces and all_reduces)

    @property
    def mixed_precision(self) -> Any:
        """The ``MixedPrecisionPolicy`` that ``fully_shard`` got, where all parameters share it."""
        expect(self._inside, "mp_policy")
        return self._inside.mp_policy

    @property
    def half_reduced(self) -> bool:
        """Whether earlier micro-batches were reduced over the shards and wait for the replicas."""
        return self._inside._partial_reduce_output is not None

    @property
    def reduced_scale(self) -> float:
        """The factor that makes the reduced gradient the mean over the workers."""
        return self.divisor / (self.shard_size * self.num_copies)

    @property
    def divisor(self) -> float:
        """The number by which FSDP2 divides the sum of the workers' gradients."""
        factor = self._inside.gradient_divide_factor
        return self.shard_size * self.num_copies if factor is None else float(factor)

    @property
    def reduced_is_readable(self) -> bool:
        """Whether the reduced gradient is there, and no hook has changed it."""
        waited = getattr(self._state._state_ctx, "is_last_backward", True)
        return bool(waited and self._inside._all_reduce_hook is None)

    @property
    def reduce_scatter(self) -> Any:
        """FSDP2's reduction of gradients over the shards, or the user's in its place."""
        expect(self._inside, "_reduce_scatter_comm")
        return self._inside._reduce_scatter_comm

    def belongs_to(self, state: Any) -> bool:
        """Return whether the group has the same root as a state of FSDP2."""
        return self._state._state_ctx is state._state_ctx


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Which slice of a parameter a shard holds."""

    shape: Sequence[int]  # of the whole parameter
    dim: int  # that is cut
    first: int  # index in that dimension where the shard begins

    @property
    def stride(self) -> int:
        """Elements from the beginning of one run to that of the next."""
        return self.shape[self.dim] * self._inner

    @property
    def offset(self) -> int:
        """Position of the first element."""
        return self.first * self._inner

    @property
    def _inner(self) -> int:
        return math.prod(self.shape[self.dim + 1 :])


class ManagedParameter:
    """A parameter that FSDP2 shards; ``inside`` is FSDP2's own object."""

    def __init__(self, name: str, inside: Any, group: ParameterGroup) -> None:
        expect(inside, *_PARAMETER_ATTRIBUTES)
        self.name = name
        self.inside = inside
        self.group = group
        self.is_dtensor: bool = inside.is_dtensor

    @property
    def tensor(self) -> Tensor:
        """The sharded parameter, which the optimizer holds."""
        tensor: Tensor = self.inside.sharded_param
        return tensor

    @property
    def unsharded(self) -> Tensor | None:
        """The whole parameter, by which the model computes; None before it was gathered."""
        return getattr(self.inside, "_unsharded_param", None)

    @property
    def summed_in(self) -> torch.dtype:
        """The type in which FSDP2 means to reduce the gradient."""
        if hasattr(type(self.inside), "unsharded_grad_dtype"):  # since torch 2.15
            wanted = self.inside.mp_policy.reduce_dtype or self.tensor.grad_dtype
        else:
            policy = self.group.mixed_precision
            wanted = policy.reduce_dtype or policy.param_dtype
        return wanted or self.tensor.dtype

    @property
    def computed_in(self) -> torch.dtype:
        """The type in which the gradient is computed, unless autocast takes another."""
        policy = getattr(self.inside, "mp_policy", None) or self.group.mixed_precision
        return policy.param_dtype or self.tensor.dtype

    @property
    def unreduced(self) -> Tensor | None:
        """The whole gradient that was accumulated without a reduction."""
        accumulated: Tensor | None = self.inside.unsharded_accumulated_grad
        whole = self.unsharded
        return whole.grad if accumulated is None and whole is not None else accumulated

    @property
    def reduced(self) -> Tensor | None:
        """This rank's shard of the reduced gradient."""
        gradient = self.tensor.grad
        return None if gradient is None else local_of(gradient)

    @property
    def place(self) -> ShardPlace:
        """Where this rank's shard lies in the parameter; under TP, in this rank's part of it."""
        shape = self.inside._orig_size
        dim = self.inside.fsdp_placement.dim
        rank = getattr(self.inside.mesh_info, "shard_mesh_rank", 0)
        first = rank * self.inside.padded_sharded_param_size[dim]
        return ShardPlace(shape, dim, min(first, shape[dim]))


def ends_backward(state: Any) -> bool:
    """Return whether FSDP2 has queued its callback at the end of a backward pass."""
    expect(state._state_ctx, "post_backward_final_callback_queued")
    return bool(state._state_ctx.post_backward_final_callback_queued)


def waits_by_hand(state: Any) -> bool:
    """Return whether the training itself waits for the reductions of a backward pass, later."""
    return bool(getattr(state._state_ctx, "manual_backward_finalization_active", False))


def is_fsdp2(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to the model or to modules in it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def process_group_of(group: ParameterGroup) -> dist.ProcessGroup:
    """Return a process group of the workers that reduce a group of parameters.

    Usually one that exists. HSDP inside a larger mesh has none: then its members, and they alone,
    make a gloo group, so all of them must call this at the same point of the program.
    """
    if group.num_copies == 1 and group.shard_group is not None:
        return group.shard_group
    if group.shard_size == 1 and group.replicate_group is not None:
        return group.replicate_group
    if len(group.ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    made: dist.ProcessGroup = dist.new_group(
        list(group.ranks), backend="gloo", use_local_synchronization=True
    )
    return made


def managed_parameters(model: nn.Module, workers: Collection[int] = ()) -> list[ManagedParameter]:
    """Return the parameters that FSDP2 reduces over the same workers, in the model's order.

    Experts may lie on another mesh than the rest. A worker's gradient of its experts stems from
    the tokens of others, too, so the two are never compared together. By default, ``workers`` are
    the most that reduce any, and among equally many those of the most elements.
    """
    meshes = parameters_by_mesh(model)
    if not meshes:
        raise UnsupportedError(
            f"watch() expected a model whose parameters fully_shard has sharded, got "
            f"{type(model).__name__} without any; call watch() after fully_shard()"
        )
    chosen = [each for each in meshes if set(each[0].group.ranks) == set(workers)]
    if workers and not chosen:
        known = " or ".join(_in_words(each[0].group.ranks) for each in meshes)
        raise UnsupportedError(
            f"watch() expected a process_group that fully_shard reduces over: {known}; got "
            f"{_in_words(workers)}; pass the group of the mesh whose parameters to watch"
        )
    return (chosen or meshes)[0]


def _in_words(ranks: Collection[int]) -> str:
    return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"


def parameters_by_mesh(model: nn.Module) -> list[list[ManagedParameter]]:
    """Return all parameters that FSDP2 shards, trainable or not, by how they are reduced.

    First those of the most workers, and among equally many those of the most elements; each in the
    model's order.
    """
    meshes: dict[tuple[object, ...], list[ManagedParameter]] = {}
    for parameter in every_parameter(model):
        group = parameter.group
        meshes.setdefault((group.ranks, group.num_copies), []).append(parameter)

    def size(managed: list[ManagedParameter]) -> tuple[int, int]:
        return len(managed[0].group.ranks), sum(p.tensor.numel() for p in managed)

    return sorted(meshes.values(), key=size, reverse=True)


def fsdp2_states(model: nn.Module) -> list[Any]:
    """Return FSDP2's own states of the modules to which ``fully_shard`` was applied."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        expect(module, "_get_fsdp_state")
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def casting_policy(module: FSDPModule) -> Any:
    """Return the ``MixedPrecisionPolicy`` by which a module casts what enters and leaves it."""
    state = module._get_fsdp_state()
    expect(state, "_mp_policy")
    return state._mp_policy


def parameter_groups(module: FSDPModule) -> list[ParameterGroup]:
    """Return the groups of parameters of one module to which ``fully_shard`` was applied."""
    state = module._get_fsdp_state()
    return [ParameterGroup(inside, state) for inside in _groups(state)]


def every_parameter(model: nn.Module) -> list[ManagedParameter]:
    """Return all parameters that FSDP2 shards, trained or not, in the model's order."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), canonical_name(name))
    found = {}
    for state in fsdp2_states(model):
        for inside in _groups(state):
            group = ParameterGroup(inside, state)
            for parameter in inside.fsdp_params:
                expect(parameter, "_module_info")
                info = parameter._module_info
                name = names[id(getattr(info.module, info.param_name))]
                found[name] = ManagedParameter(name, parameter, group)
    return [found[name] for name in names.values() if name in found]


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older releases have a single one
        expect(state, "_fsdp_param_group")
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


Shard = tuple[str, Tensor, ShardPlace]
"""A parameter's name, a rank's contiguous slice of it, and the slice's place."""


def measure_shards(sketcher: Sketcher, shards: Sequence[Shard], into: GradientTotals) -> None:
    """Add shards to totals such that all ranks' together give the totals of whole parameters.

    In memory a shard is a number of runs of elements that lie apart in the parameter: one run when
    the first dimension is cut. All runs that are alone in a shard, or long, are measured in one
    call. Shards may be empty.
    """
    runs: list[Measured] = []
    for name, shard, place in shards:
        if not shard.numel():
            continue
        several = shard.detach().reshape(math.prod(place.shape[: place.dim]), -1)
        if len(several) == 1 or several.shape[1] >= _LONG_RUN:
            runs += [
                (name, run, index * place.stride + place.offset)
                for index, run in enumerate(several)
            ]
        else:
            _measure_short_runs(sketcher, name, several, place, into)
    sketcher.measure_many(runs, into)


def _measure_short_runs(
    sketcher: Sketcher, name: str, runs: Tensor, place: ShardPlace, into: GradientTotals
) -> None:
    """Lay several runs out with the zeros that belong between them, in a tensor of limited size."""
    num_runs, length = runs.shape
    stride = place.stride
    offset = place.offset
    at_once = min(num_runs, max(1, _SCRATCH_ELEMENTS // stride))
    scratch = torch.zeros(at_once, stride, dtype=runs.dtype, device=runs.device)
    for index, part in zip(range(0, num_runs, at_once), torch.split(runs, at_once), strict=True):
        scratch[: len(part), offset : offset + length] = part
        sketcher.measure(name, scratch[: len(part)], into, start=index * stride)


def managed_places(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], ManagedParameter]]:
    """Yield the modules and keys that hold what FSDP2 shards; a tied parameter has several."""
    for managed in every_parameter(model):
        info = managed.inside._module_info
        yield (info.module, info.param_name), managed
        for place in zip(info.shared_modules, info.shared_param_names, strict=True):
            yield place, managed


class ShardLookup:
    """Finds the shard of a parameter that FSDP2 replaces in its module from time to time.

    While a layer computes, its module holds the whole parameter; the root's does so from before
    the hooks of a forward pass until its backward pass ends, and after an evaluation. Name,
    gradient and optimizer state belong to the shard, which stays.
    """

    def __init__(self, model: nn.Module, workers: Collection[int] = ()) -> None:
        replicas = managed_parameters(model, workers)[0].group.replicas
        self._managed = {
            place: managed
            for place, managed in managed_places(model)
            if managed.group.replicas == replicas
        }

    def __call__(self, holder: nn.Module, key: str) -> Tensor | None:
        """Return the shard of the parameter ``key`` of a module; None if FSDP2 does not manage it.

        FSDP2 does not reduce a parameter that it ignores, or that lies outside of all sharded
        modules. None as well for one on another mesh: its replicas are other workers than those of
        the compared parameters.
        """
        managed = self._managed.get((holder, key))
        return None if managed is None else managed.tensor
