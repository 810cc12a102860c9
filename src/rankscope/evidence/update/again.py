"""The update of one parameter, computed again by a copy of its optimizer that has nothing else.

The copy has the optimizer's class, the settings of the parameter's group, and copies of parameter,
gradient and state. It runs the class's own ``step``, without hooks and without what was put in its
place on the instance. An operation that communicates, or that writes into a tensor of the training,
is refused before it runs; random generators are put back.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.evidence.canary.alone import alone
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.layout import whole_of
from rankscope.evidence.canary.replay import in_short
from rankscope.evidence.canary.state import RandomGenerators
from rankscope.wrappers.ranks import local_of

_SHARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEFT_OUT = frozenset({"state", "param_groups", "step"})
_HOOKS = "hooks"
_WHAT = "its copy runs on one rank alone, and its step"


@dataclass(frozen=True, slots=True)
class UpdateInput:
    """What an optimizer holds of one parameter, or of a part of it."""

    value: Tensor
    gradient: Tensor
    state: Mapping[str, Any]

    def moved(self, eps: float) -> "UpdateInput":
        """Return the same with gradient and state moved by roundings.

        One in four elements is moved, by ``eps`` of its size, up or down.
        """
        gradient = _moved(self.gradient, eps, 0)
        state = {
            name: _moved(value, eps, seed)
            if type(value) is Tensor and value.is_floating_point() and value.numel() > 1
            else value
            for seed, (name, value) in enumerate(self.state.items(), start=1)
        }
        return UpdateInput(self.value, gradient, state)


def _moved(tensor: Tensor, eps: float, seed: int) -> Tensor:
    draw = torch.Generator(tensor.device).manual_seed(seed)
    moves = torch.empty(tensor.shape, device=tensor.device, dtype=torch.float32)
    moves.uniform_(-4 / 3, 4 / 3, generator=draw)
    return tensor + (moves.trunc_().mul_(eps) * tensor).to(tensor.dtype)


class LoneOptimizer:
    """Updates one parameter of an optimizer as if it had no other; CanaryDeclined if it cannot.

    ``of_training`` are addresses of the storages of the training's tensors. ``computed_in`` is the
    coarsest type of floating-point numbers that any operation has returned, ``random`` whether any
    may have drawn random numbers.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, of_training: frozenset[int]
    ) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._of_training = of_training
        self._mesh: DeviceMesh | None = None
        self.computed_in: torch.dtype | None = None
        self.random = False
        self._every = [p for group in optimizer.param_groups for p in group["params"]]
        own = vars(optimizer)
        if not isinstance(own.get("param_groups"), list):
            raise CanaryDeclined("it wraps another optimizer")
        for value in own.values():
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(value, dict | list | tuple) else (value,):
                if isinstance(part, torch.optim.Optimizer):
                    raise CanaryDeclined("it wraps another optimizer")

    def update(self, held: UpdateInput, *others: UpdateInput, seed: int | None = None) -> Tensor:
        """Return the whole parameter after a step of the optimizer; CanaryDeclined without one.

        ``others`` come before the parameter in the same group. ``seed`` is that of all random
        generators; None leaves them as they are.
        """
        try:
            return self._update([*others, held], seed)
        except CanaryDeclined:
            raise
        except Exception as error:
            if not isinstance(self._parameter, DTensor) or self._mesh is not None:
                raise CanaryDeclined(f"it cannot run on a copy ({in_short(error)})") from error
        self._mesh = self._parameter.device_mesh  # its step may expect one
        try:
            return self.update(held, *others, seed=seed)
        except CanaryDeclined:
            self._mesh = None
            raise

    def _update(self, each: Sequence[UpdateInput], seed: int | None) -> Tensor:
        device = self._parameter.device
        made = [self._parameter_of(one) for one in each]
        optimizer = self._copy(made, [one.state for one in each])
        generators = RandomGenerators(device)
        if seed is not None:
            generators.seed(seed)
        watched = _Watched(self._of_training, generators)
        step: Any = type(optimizer).step
        if getattr(step, "hooked", None):  # by torch, which calls hooks on all optimizers
            step = step.__wrapped__
        try:
            with alone(device, watched, what=_WHAT), watched.types:
                step(optimizer)
        finally:
            generators.put_back()
        self.random |= watched.types.random
        seen = watched.types.coarsest
        if self.computed_in is None or _eps(seen) > _eps(self.computed_in):
            self.computed_in = seen
        return local_of(made[-1].detach())

    def _parameter_of(self, held: UpdateInput) -> nn.Parameter:
        """Return a copy of the parameter with its gradient, and what the user has noted on it."""
        value = nn.Parameter(self._laid_out(held.value.clone()))
        for name, noted in vars(self._parameter).items():
            if not name.startswith("_") and not isinstance(noted, Tensor):
                setattr(value, name, noted)
        value.grad = self._laid_out(held.gradient.clone())
        return value

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """Return a tensor as each rank of the mesh would hold a whole one, where one is needed."""
        if self._mesh is None or not tensor.ndim:
            return tensor
        everywhere = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(tensor, self._mesh, everywhere, run_check=False)

    def _copy(
        self, made: Sequence[nn.Parameter], states: Sequence[Mapping[str, Any]]
    ) -> torch.optim.Optimizer:
        """Return a copy of the optimizer that holds these parameters alone."""
        original = self._optimizer
        target = made[-1]
        memo: dict[int, Any] = {id(p): p for p in self._every}
        memo[id(self._parameter)] = target
        optimizer: Any = object.__new__(type(original))
        for name, value in vars(original).items():
            if name in _LEFT_OUT:
                continue
            vars(optimizer)[name] = OrderedDict() if name.endswith(_HOOKS) else _copied(value, memo)
            known = vars(optimizer)[name]
            if isinstance(known, dict) and id(self._parameter) in known:
                known[id(target)] = known[id(self._parameter)]
        optimizer.param_groups = [self._group(made, memo)]
        optimizer.state = defaultdict(dict)
        states_of: dict[Any, Any] = original.state
        for key, value in states_of.items():
            if not isinstance(key, Tensor):  # of all parameters
                optimizer.state[key] = _copied(value, memo)
        for value, state in zip(made, states, strict=True):
            if state:
                optimizer.state[value] = {
                    name: self._laid_out(part.clone())
                    if isinstance(part, Tensor)
                    else _copied(part, memo)
                    for name, part in state.items()
                }
        copied: torch.optim.Optimizer = optimizer
        return copied

    def _group(self, made: Sequence[nn.Parameter], memo: dict[int, Any]) -> dict[str, Any]:
        """Return the settings of the parameter's group for other parameters."""
        group, place = next(
            (group, place)
            for group in self._optimizer.param_groups
            for place, each in enumerate(group["params"])
            if each is self._parameter
        )
        settings = {
            name: _copied(value, memo)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        if "param_names" in group:
            settings["param_names"] = [group["param_names"][place]] * len(made)
        return {"params": list(made), **settings}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a value, or the same object where it cannot be copied."""
    if isinstance(value, _SHARED):
        return value
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        return value


class _Watched:
    """Callbacks of a step on a copy: none of it may change the training."""

    def __init__(self, of_training: frozenset[int], generators: RandomGenerators) -> None:
        self._of_training = of_training
        self.before_draw = generators.before_draw
        self.types = _Types()

    def before_write(self, tensor: Tensor) -> None:
        """Refuse to write into the training: CanaryDeclined."""
        if address_of(tensor) in self._of_training:
            raise CanaryDeclined("its step changes other tensors than the parameter's own")


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the coarsest type that operations return, and whether they draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = torch.float64
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        self.random |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.coarsest = max(self.coarsest, one.dtype, key=_eps)
        return result


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def is_shared(tensor: Tensor) -> bool:
    """Return whether ranks hold parts of a tensor."""
    return isinstance(tensor, DTensor) and any(not p.is_replicate() for p in tensor.placements)


def own_part(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> UpdateInput:
    """Return what this rank's optimizer holds of a parameter: its own part, as plain tensors."""
    own = {n: local_of(v) if isinstance(v, Tensor) else v for n, v in state.items()}
    return UpdateInput(local_of(parameter.detach()), local_of(gradient), own)


def why_apart(parameter: Tensor, state: Mapping[str, Any]) -> str:
    """Return why the state of a shared parameter cannot be put together; empty if it can."""
    if not isinstance(parameter, DTensor) or not is_shared(parameter):
        return ""
    for name, value in state.items():
        if isinstance(value, Tensor):
            known = isinstance(value, DTensor) or value.numel() == 1
            if not known and _shape_of_whole(value, parameter) is None:
                return f"its state {name} belongs to a part of the parameter, and has another shape"
        elif not isinstance(value, bool | int | float | str | type(None)):
            return (
                f"its state {name} is of type {type(value).__name__}, which cannot be put together"
            )
    return ""


def whole(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> UpdateInput:
    """Return what an optimizer would hold of the whole parameter.

    All ranks that hold a part of it call this, for the same parameters in the same order.
    """
    like = parameter if isinstance(parameter, DTensor) and is_shared(parameter) else None
    put_together = {n: _whole(v, like) if isinstance(v, Tensor) else v for n, v in state.items()}
    return UpdateInput(_whole(parameter.detach(), like), _whole(gradient, like), put_together)


def _whole(tensor: Tensor, like: DTensor | None) -> Tensor:
    if isinstance(tensor, DTensor) or like is None:
        return whole_of(tensor)
    shape = _shape_of_whole(tensor, like)
    if shape is None or tensor.numel() == 1:
        return tensor
    spread = DTensor.from_local(
        tensor,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole_of(spread)


def _shape_of_whole(part: Tensor, like: DTensor) -> torch.Size | None:
    """Return the shape of what ranks hold parts of, as of a parameter; None if unknown."""
    local = local_of(like).shape
    if part.ndim != len(local):
        return None
    cut = {getattr(placement, "dim", None) for placement in like.placements}
    sizes = list(like.shape)
    for dim, size in enumerate(part.shape):
        if size != local[dim]:
            if size != 1 or dim in cut:
                return None
            sizes[dim] = 1
    return torch.Size(sizes)


class Cuts:
    """The cuts by which a whole parameter becomes this rank's part; CanaryDeclined if unknown."""

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self._cuts: list[tuple[str, int, int, int]] = []  # name of the axis, dim, parts, own part
        if not isinstance(parameter, DTensor):
            return
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                continue
            dim = getattr(placement, "dim", None)
            if dim is None:
                raise CanaryDeclined(f"a parameter is laid out over a mesh as {placement}")
            cut = names[axis], int(dim), mesh.size(axis), mesh.get_local_rank(axis)
            self._cuts.append(cut)
        local = local_of(parameter.detach())
        if not bool(local.isfinite().all()):
            raise CanaryDeclined("its parameters are not finite")
        for _ in range(2):  # FSDP2 cuts what the axes after its own have cut
            self._cuts.reverse()
            own = self.part(value)
            if own.shape == local.shape and bool((own == local).all()):
                return
        raise CanaryDeclined("a parameter is laid out over a mesh in an order that is not known")

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, as a view."""
        for _, dim, parts, at in self._cuts:
            tensor = _cut(tensor, dim, parts, at)
        return tensor

    def steps(self, held: UpdateInput) -> Iterator[tuple[str, UpdateInput, "Cuts"]]:
        """Yield the parts after each cut: the axes so far in words, a part, the cuts to follow."""
        axes: list[str] = []
        for number, one in enumerate(self._cuts, start=1):
            axis, dim, parts, at = one
            if parts == 1:
                continue
            shape = held.value.shape
            parts_of = partial(_cut_alike, shape=shape, dim=dim, parts=parts, at=at)
            state = {name: parts_of(value) for name, value in held.state.items()}
            held = UpdateInput(parts_of(held.value), parts_of(held.gradient), state)
            axes.append(axis)
            rest = copy.copy(self)
            rest._cuts = self._cuts[number:]
            yield " and ".join(filter(None, axes)), held, rest


def _cut_alike(value: Any, *, shape: torch.Size, dim: int, parts: int, at: int) -> Any:
    """Return a part of what has this size along a dimension, and anything else as it is."""
    alike = (
        isinstance(value, Tensor) and value.ndim == len(shape) and value.shape[dim] == shape[dim]
    )
    return _cut(value, dim, parts, at) if alike else value


def _cut(tensor: Tensor, dim: int, parts: int, at: int) -> Tensor:
    cuts = tensor.chunk(parts, dim)
    return cuts[at] if at < len(cuts) else tensor.narrow(dim, 0, 0)
