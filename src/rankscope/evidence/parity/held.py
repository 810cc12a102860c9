"""Which elements of a model's parameters lie in which tensors, and under which names.

An optimizer may hold them in tensors of its own: DeepSpeed's ZeRO 1 to 3 and Megatron-core keep
flat shards, or copies in float32. And layouts, or ranks, may call one parameter otherwise.

A rule has the name of a parameter in the other layout, and its names in this one, of which there
may be several: this layout has split what the other one has fused, along the first dimension. Each
``*`` in the names stands for any text, the same one in all names of the rule.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.errors import UnsupportedError
from rankscope.evidence.optimizer.probe import OptimizedParameter
from rankscope.evidence.parity.figures import Named, Part
from rankscope.gradients.names import canonical_name
from rankscope.private import callers
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.megatron import (
    check_megatron,
    is_sharded,
    own_shards,
    whole_gradients,
)
from rankscope.wrappers.optimizers import all_of, memory_of

Rule = tuple[str, Sequence[str]]
"""A name of the other layout, and its names in this one."""


class Portion(NamedTuple):
    """What a tensor of this rank is in the other layout, or among the tensors of all ranks."""

    name: str
    shape: tuple[int, ...]
    first: int  # row at which it begins


class Naming:
    """Names of tensors in the other layout; without rules, their own.

    ``of_ranks`` has the tensors that are others, or parts of others, among those of all ranks: the
    rules hold for what they are there.

    Raises UnsupportedError: parts of a fused parameter are not there, or do not fit together.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        shapes: Mapping[str, tuple[int, ...]],
        of_ranks: Mapping[str, Portion] | None = None,
    ) -> None:
        self._pieces = dict(of_ranks or {})
        wholes = {n: self._pieces.get(n, Portion(n, shape, 0)) for n, shape in shapes.items()}
        whole_shapes = {piece.name: piece.shape for piece in wholes.values()}
        for name, (whole, _, first) in wholes.items():
            for other, own in rules:
                patterns = ("(.+)".join(map(re.escape, each.split("*"))) for each in own)
                found = next((m for each in patterns if (m := re.fullmatch(each, whole))), None)
                if found is not None:
                    piece = _piece(whole, other, own, found, whole_shapes)
                    self._pieces[name] = piece._replace(first=piece.first + first)
                    break

    def of(self, name: str) -> str:
        """Return the name of a tensor in the other layout."""
        piece = self._pieces.get(name)
        return name if piece is None else piece.name

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor in the other layout."""
        piece = self._pieces.get(name)
        return tuple(own) if piece is None else piece.shape

    def placed(self, name: str, part: Part) -> Part:
        """Return a part of a tensor as one of that in the other layout."""
        piece = self._pieces.get(name)
        if piece is None:
            return part
        if len(part.shape) == len(piece.shape):
            first = (part.first[0] + piece.first, *part.first[1:]) if part.first else ()
            return part._replace(shape=piece.shape, first=first)
        row = math.prod(piece.shape[1:])  # a part of the flat tensor
        return part._replace(
            shape=(math.prod(piece.shape),), first=(part.first[0] + piece.first * row,)
        )


def _filled(pattern: str, found: re.Match[str]) -> str:
    texts = iter(found.groups())
    return re.sub(r"\*", lambda _: next(texts, "*"), pattern)


def _piece(
    name: str,
    other: str,
    own: Sequence[str],
    found: re.Match[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Portion:
    names = [_filled(each, found) for each in own]
    missing = [each for each in names if each not in shapes]
    if missing:
        raise UnsupportedError(f"no parameter is called {missing[0]}, a part of {other}")
    of_all = [shapes[each] for each in names]
    if len(names) == 1:
        return Portion(_filled(other, found), of_all[0], 0)
    if not all(of_all) or len({shape[1:] for shape in of_all}) > 1:
        sizes = ", ".join(" × ".join(map(str, shape)) for shape in of_all)
        raise UnsupportedError(f"the parts of {other} do not fit together: {sizes}")
    first = sum(shape[0] for shape in of_all[: names.index(name)])
    shape = (sum(shape[0] for shape in of_all), *of_all[0][1:])
    return Portion(_filled(other, found), shape, first)


class Held(NamedTuple):
    """What an optimizer holds of a parameter in one of its tensors."""

    name: str
    # returns its part of a tensor of that shape: the tensor itself, a gradient, a moment
    part: Callable[[Tensor], Tensor | Part]


class HeldElements:
    """Finds the parameters of a model in an optimizer's tensors.

    ``firsts`` has the first element that a rank holds in ``main_param``, by parameter's name: those
    of Megatron-core's distributed optimizer. Other copies of that name are whole, as are
    ``copies``, the pairs of a parameter and what an optimizer of the loop's own trains for it.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[int, str],
        firsts: Mapping[str, int],
        copies: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._module = module
        self._names = names
        self._firsts = firsts
        self._copies = {id(parameter): copy for parameter, copy in copies}
        self._known: dict[int, tuple[Held, ...]] = {}
        self._by_memory: dict[int, list[tuple[str, Part]]] = {}

    def in_tensor(self, tensor: Tensor) -> tuple[Held, ...]:
        """Return the parameters that an optimizer's tensor holds elements of; none of another's."""
        name = self._names.get(id(tensor))
        if name is not None:
            return (Held(name, lambda same: same),)
        found = self._known.get(id(tensor))
        if found is None:
            found = self._known[id(tensor)] = tuple(self._pieces_in(tensor))
        return found

    def masters_of(self, parameter: Tensor) -> Iterator[Part]:
        """Yield the parts of a parameter that an optimizer trains in its place."""
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        owner: Any = getattr(parameter, "_z3_optimizer", None)
        copy: Any = getattr(parameter, "main_param", self._copies.get(id(parameter)))
        if owner is not None:
            group, start, _ = owner.grad_position[owner.get_param_id(parameter)]
            first, length, size = _share_of(parameter)
            if length:
                yield _cut(start, length, size, first, owner.fp32_partitioned_groups_flat[group])
        elif mapping is not None:
            fragment = mapping.hp_fragment
            first = mapping.lp_fragment_address.start
            yield _cut(0, fragment.numel(), parameter.numel(), first, fragment)
        elif copy is not None:
            first = self._firsts.get(self._names.get(id(parameter), ""), 0)
            yield _cut(0, copy.numel(), parameter.numel(), first, copy)

    def _pieces_in(self, flat: Tensor) -> Iterator[Held]:
        memory = memory_of(flat)
        if not self._by_memory:
            self._look()
        begin = int(flat.storage_offset())
        for name, part in self._by_memory.get(memory, ()):
            at = int(part.tensor.storage_offset())
            low = max(at, begin)
            high = min(at + part.tensor.numel(), begin + flat.numel())
            if low < high:
                first = part.first[0] + low - at
                yield Held(
                    name, functools.partial(_cut, low - begin, high - low, part.shape[0], first)
                )

    def _look(self) -> None:
        """Note where in memory the parameters lie, and what an optimizer trains in their place."""
        for parameter in self._module.parameters():
            name = self._names.get(id(parameter))
            if name is None:
                continue
            parts = list(self.masters_of(parameter))
            if memory_of(parameter) and parameter.is_contiguous():
                parts.append(_cut(0, parameter.numel(), parameter.numel(), 0, parameter))
            for part in parts:
                self._by_memory.setdefault(memory_of(part.tensor), []).append((name, part))


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether ZeRO 3 shards a parameter: outside of its layer, only a shard is there."""
    return hasattr(parameter, "ds_tensor")


def size_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter or buffer, also of one that ZeRO 3 shards."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def stored(tensor: Tensor) -> Tensor | Part:
    """Return what a rank holds of a parameter: under ZeRO 3 its shard, else the tensor."""
    if not is_partitioned(tensor):
        return tensor
    first, length, size = _share_of(tensor)
    return _cut(0, length, size, first, tensor.ds_tensor)  # type: ignore[attr-defined]


def _share_of(parameter: Any) -> tuple[int, int, int]:
    """Return where this rank's shard under ZeRO 3 begins, its length, and that of all."""
    size = int(parameter.ds_numel)
    shard = int(parameter.partition_numel())
    first = min(dist.get_rank(parameter.ds_process_group) * shard, size)
    return first, min(shard, size - first), size


def _cut(start: int, length: int, size: int, first: int, flat: Tensor) -> Part:
    return Part(flat.detach().view(-1).narrow(0, start, length), (size,), (first,))


class _Share(NamedTuple):
    """The experts of this rank, ``own`` of them, among those of ``num_ranks`` ranks."""

    layer: str  # the layer around them
    rank: int
    num_ranks: int
    own: int


class DealtExperts:
    """Which of all experts a rank's are, where each rank's have the same names.

    Megatron-core and DeepSpeed mark the parameters of such experts by ``allreduce = False``. A
    rank's experts are numbered from 0, or lie in one tensor, one after the other. The layer around
    them holds the ranks over which all experts are dealt out in order (``ep_group``); an
    UnsupportedError where it does not. ``pieces`` says what the rank's are among those of all.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shares = {
            name: _Share(name, group.rank(), group.size(), int(each.num_local_experts))
            for name, each in module.named_modules()
            if isinstance(group := getattr(each, "ep_group", None), dist.ProcessGroup)
            and hasattr(each, "num_local_experts")
        }
        self.pieces: dict[str, Portion] = {}
        for name, parameter in module.named_parameters():
            if not is_dealt_out(parameter):
                continue
            share = self._share_of(name)
            if share is None:
                raise UnsupportedError(
                    f"{name} stands for another expert on each rank, by one name for all, and no "
                    "layer around it holds their ranks as ep_group"
                )
            own = size_of(parameter)
            if _number_in(name, module, share):
                piece = Portion(canonical_name(self.name(name)), own, 0)
            else:
                whole = (own[0] * share.num_ranks, *own[1:])
                piece = Portion(canonical_name(name), whole, own[0] * share.rank)
            self.pieces[canonical_name(name)] = piece

    def name(self, own: str) -> str:
        """Return the name of a rank's layer or parameter with its expert's number among all."""
        share = self._share_of(own)
        number = None if share is None else _number_in(own, self._module, share)
        if share is None or number is None:
            return own
        start, stop = number.span()
        return f"{own[:start]}{int(number.group()) + share.rank * share.own}{own[stop:]}"

    def _share_of(self, name: str) -> _Share | None:
        around = [each for each in self._shares if not each or f"{name}.".startswith(f"{each}.")]
        return self._shares[max(around, key=len)] if around else None


def is_dealt_out(parameter: Tensor) -> bool:
    """Return whether other ranks may have another expert under the name of a parameter."""
    return not getattr(parameter, "allreduce", True)


def _number_in(name: str, module: nn.Module, share: _Share) -> re.Match[str] | None:
    """Return where a name has the number of an expert among a rank's own; None: nowhere.

    It is the index in a list of modules, or the end of a parameter's name, as in ``weight0``.
    """
    at: Any = module.get_submodule(share.layer)
    count = share.own
    for part in re.compile(r"[^.]+").finditer(name, len(share.layer)):
        dealt = isinstance(at, nn.ModuleList) and any(map(is_dealt_out, at.parameters()))
        if dealt and len(at) == count:
            return part
        if part.end() == len(name):
            ending = re.compile(r"\d+$").search(name, part.start())
            stem = name[part.start() : ending.start()] if ending else ""
            numbered = stem and all(
                isinstance(getattr(at, f"{stem}{number}", None), Tensor) for number in range(count)
            )
            return ending if numbered else None
        at = getattr(at, part.group())
    return None


class MegatronBuffers:
    """What this rank holds of the gradient once it is reduced, which no parameter does.

    It is a shard with ZeRO's reduce-scatter. ``gradients`` are views of the wrapper's buffers, and
    ``firsts`` the first element of each shard, by the parameters' names; empty without shards. An
    UnsupportedError: the wrapper works in a way that is not known.
    """

    def __init__(self, ddp: Any, names: Mapping[int, str]) -> None:
        check_megatron(ddp, experts=True)
        self.gradients: list[Named] = []
        self.firsts: dict[str, int] = {}
        sizes = {names[id(p)]: p.numel() for p in ddp.module.parameters() if id(p) in names}
        for group in [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]:
            if is_sharded(ddp):
                for name, gradient, first in own_shards(group, names):
                    self.gradients.append((name, Part(gradient, (sizes[name],), (first,))))
                    self.firsts[name] = first
            else:
                self.gradients += [(name, each) for name, each, _ in whole_gradients(group, names)]
        self._end = Relay(ddp, "finish_grad_sync")

    def subscribe(self, after: Callable[..., None]) -> Callable[[], object]:
        """Call a bound method after each reduction; return a function that ends this."""
        return self._end.subscribe(after=after)


_SETTINGS = ("lr", "betas", "momentum", "weight_decay", "eps", "alpha", "dampening", "nesterov")
_SCALER = "torch.amp.grad_scaler"


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def like_parameter(parameter: Tensor, value: Any) -> Any:
    """Return a state as its parameter is: distributed, where it has the shape of its shard."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def state_of(optimizer: Any, held: OptimizedParameter) -> Mapping[str, Any]:
    """Return the state as the optimizer has it: not the local parts alone."""
    for each in all_of(optimizer):
        state: Mapping[str, Any] = getattr(getattr(each, "optim", each), "state", {})
        if held.whole in state:
            return state[held.whole]  # type: ignore[index, no-any-return]
    return {}


def scaler_around() -> dict[str, float]:
    """Return the state of the gradient scaler that calls an optimizer; empty without one."""
    for frame in callers():
        own = frame.f_locals.get("self") if frame.f_globals.get("__name__") == _SCALER else None
        if isinstance(own, torch.amp.GradScaler):
            return own.state_dict()
    return {}


def settings_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are compared."""
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = value
        elif isinstance(value, list | tuple):
            found[name] = [float(one) for one in value]
    return found
