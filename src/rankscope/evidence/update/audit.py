"""The audit of one step's update on one worker."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.bus.words import dtype_name
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import check_room, is_out_of_memory
from rankscope.evidence.canary.layout import layout_of
from rankscope.evidence.canary.replay import in_short
from rankscope.evidence.update.again import (
    Cuts,
    LoneOptimizer,
    UpdateInput,
    address_of,
    is_shared,
    own_part,
    whole,
    why_apart,
)
from rankscope.evidence.update.compare import FIELDS, MOST, MOST_OF_SMALL, PartOfUpdate, UpdateShare
from rankscope.wrappers.ranks import local_of
from rankscope.wrappers.rendezvous import Rendezvous

_SMALL = 2**22
"""Elements of all parameters up to which all of them are chosen."""

LARGEST = 2**26
"""Elements of all parameters that are chosen, at most: copies must fit beside the training."""


class Chosen(NamedTuple):
    """A parameter whose update is computed again."""

    name: str
    parameter: Tensor
    group: int


def choose(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], turn: int
) -> tuple[list[Chosen], int]:
    """Return some parameters of an optimizer, and the number of those that it trains.

    Parameters of one group and type that have the same shape and layout are of one kind. A small
    model's are all chosen, a large one's one by one from each kind. ``turn`` rises, and is equal on
    all ranks.
    """
    kinds: dict[tuple[Any, ...], list[Chosen]] = {}
    every = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not parameter.requires_grad or not parameter.is_floating_point():
                continue
            name = names.get(id(parameter), f"parameter {place} of group {number}")
            one = Chosen(name, parameter, number)
            every.append(one)
            if parameter.layout is torch.strided:
                layout = layout_of(parameter)
                kind = number, parameter.dtype, tuple(parameter.shape), layout and layout[1]
                kinds.setdefault(kind, []).append(one)
    small = sum(one.parameter.numel() for one in every) <= _SMALL
    if small:
        fitting = [one for of_kind in kinds.values() for one in of_kind]
        return _from(fitting, turn, MOST_OF_SMALL), len(every)
    picked = _from([of_kind[turn % len(of_kind)] for of_kind in kinds.values()], turn, MOST)
    room = LARGEST
    fitting = []
    for one in sorted(picked, key=lambda each: each.parameter.numel()):
        room -= one.parameter.numel()
        fitting += [one] if room >= 0 else []
    return fitting, len(every)


def _from(each: Sequence[Chosen], turn: int, most: int) -> list[Chosen]:
    """Return at most so many, those in turn."""
    first = turn * most % len(each) if len(each) > most else 0
    return [*each[first:], *each[:first]][:most]


AGREE_SECONDS = 30.0
"""The longest wait of a rank for the others to agree on gathering whole parameters."""

_PIECE = 2**22  # elements that are measured at once
_COPIES = 12  # of a whole parameter, that a step on a copy may take
_OTHER = -3.0  # times the gradient, for a second parameter beside the first
_DEPENDS = "the update of a parameter depends on the others"
_NOT_MET = "the ranks that hold parts of its parameters did not meet at watch()"


@dataclass(slots=True, eq=False)
class _Watch:
    """A chosen parameter between a forward pass and the end of its step."""

    chosen: Chosen
    # the model's own copy of it, which the training writes after the update
    copied_to: Tensor | None
    before: Tensor  # this rank's part of it in the forward pass; then as the optimizer is called
    expected: Tensor | None = None  # the same after the update, computed again
    after: Tensor | None = None  # the same after the update
    # squared distance of what was computed from values that were moved by roundings
    spread: Tensor | float = 0.0
    moved: Tensor | float = 0.0  # squared change between the forward pass and the optimizer's call
    random: bool = False  # whether its optimizer draws random numbers
    # the same where each part along some axes was updated by itself
    trials: dict[str, Tensor] = field(default_factory=dict)
    driven: Tensor | None = None  # which elements have a gradient
    numbers: Tensor | None = None  # the numbers in the order of ``FIELDS``, on its device
    distances: list[Tensor] = field(default_factory=list)  # squared distances from the trials


class UpdateAudit:
    """Computes the update of some parameters again, between the calls of a step.

    ``names`` and ``copies``, the model's own copies of parameters that optimizers hold, are by id.
    ``meeting``: where ranks agree on gathering; None where no rank but this one holds parts.
    """

    def __init__(
        self,
        step: int,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[int, str],
        copies: Mapping[int, Tensor],
        meeting: Rendezvous | None,
    ) -> None:
        self._step = step
        self._optimizers = optimizers
        self._meeting = meeting
        self._watches: dict[int, list[_Watch]] = {}
        self._num_parameters = 0
        self._hooks: dict[str, None] = {}
        self.declined: dict[str, str] = {}
        self._numbers = {id(each): number for number, each in enumerate(optimizers)}
        self._due = set(self._numbers)
        for optimizer in optimizers:
            chosen, total = choose(optimizer, names, step)
            self._num_parameters += total
            met = [one for one in chosen if self._have_met(one.parameter)]
            self._watches[id(optimizer)] = [
                _Watch(one, copies.get(id(p := one.parameter)), local_of(p.detach()).clone())
                for one in met
            ]
            if chosen and not met:
                self.decline(optimizer, _NOT_MET)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute its update again; it is about to be called, for the first time in the step."""
        if id(optimizer) not in self._due:
            return
        self._due.discard(id(optimizer))
        watches = self._watches[id(optimizer)]
        chosen = [watch.chosen.parameter for watch in watches]
        groups = dict.fromkeys(_ranks_of(each) for each in chosen if is_shared(each))
        watches = [watch for watch in watches if watch.chosen.parameter.grad is not None]
        self._watches[id(optimizer)] = watches
        try:
            self._compute(optimizer, watches, groups)
        except Exception as error:
            self.decline(optimizer, _in_words(error))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure what its call has done; other calls than the first do not count."""
        for hook in getattr(optimizer, "_optimizer_step_post_hooks", {}).values():
            if not str(getattr(hook, "__module__", "")).startswith("rankscope."):
                self._hooks[getattr(hook, "__qualname__", type(hook).__name__)] = None
        for watch in self._watches[id(optimizer)]:
            if watch.expected is not None and watch.numbers is None:
                _measure(watch)

    def decline(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        """Do not compute its update again."""
        self._due.discard(id(optimizer))
        self.declined[type(optimizer).__name__] = why
        self._watches[id(optimizer)] = []

    def share(self) -> UpdateShare:
        """Return this worker's share, as the step ends; waits for the device."""
        for optimizer in self._optimizers:
            if id(optimizer) in self._due:
                self.decline(optimizer, "it was not called in this step")
        parts = [
            self._part(optimizer, watch)
            for optimizer in self._optimizers
            for watch in self._watches[id(optimizer)]
            if watch.numbers is not None
        ]
        return UpdateShare(tuple(parts), self._num_parameters, tuple(self._hooks), self.declined)

    def _have_met(self, parameter: Tensor) -> bool:
        """Return whether all ranks that hold a part of a parameter can agree on gathering it."""
        known = () if self._meeting is None else self._meeting.ranks
        return not is_shared(parameter) or set(_ranks_of(parameter)) <= set(known)

    def _compute(
        self,
        optimizer: torch.optim.Optimizer,
        watches: Sequence[_Watch],
        groups: Iterable[tuple[int, ...]],
    ) -> None:
        """Compute the chosen updates again, or CanaryDeclined; ``groups`` of ranks hold parts."""
        of_training = _storages(self._optimizers)
        problem = ""
        try:
            self._check(optimizer, watches)
        except CanaryDeclined as reason:
            problem = str(reason)
        states = [dict(optimizer.state.get(w.chosen.parameter, {})) for w in watches]
        self._agree(self._numbers[id(optimizer)], watches, states, groups, problem)
        smallest = _smallest(watches)
        dependent = False
        for watch, state in zip(watches, states, strict=True):
            parameter: Any = watch.chosen.parameter
            held = whole(parameter, parameter.grad, state)
            own = own_part(parameter, parameter.grad, state)
            lone = LoneOptimizer(optimizer, parameter, of_training)
            if not dependent and not problem:
                try:
                    dependent = _compute(watch, lone, held, own, alone=watch in smallest)
                except Exception as error:  # all parts are gathered still: others may wait
                    problem = _in_words(error)
        if problem or dependent:
            raise CanaryDeclined(problem or _DEPENDS)

    def _check(self, optimizer: torch.optim.Optimizer, watches: Sequence[_Watch]) -> None:
        """Check that parameters can be put together, and copied; CanaryDeclined where not."""
        if not watches:
            raise CanaryDeclined("no parameter has a gradient")
        for watch in watches:
            parameter: Any = watch.chosen.parameter
            LoneOptimizer(optimizer, parameter, frozenset())
            if parameter.grad.layout is not torch.strided:
                raise CanaryDeclined("a gradient is sparse")
            why = why_apart(parameter, optimizer.state.get(parameter, {}))
            if why:
                raise CanaryDeclined(why)
            needed = _COPIES * parameter.numel() * parameter.element_size()
            check_room(needed, parameter.device, "a whole parameter and its state")

    def _agree(
        self,
        number: int,
        watches: Sequence[_Watch],
        states: Sequence[Mapping[str, Any]],
        groups: Iterable[tuple[int, ...]],
        problem: str,
    ) -> None:
        """Agree to gather parameters with the ranks that hold parts; else CanaryDeclined."""
        shared: dict[tuple[int, ...], list[Any]] = {ranks: [] for ranks in groups}
        for watch, state in zip(watches, states, strict=True):
            parameter: Any = watch.chosen.parameter
            if is_shared(parameter):
                held = [[n, _form(v)] for n, v in state.items()]
                what = [watch.chosen.name, _form(parameter), _form(parameter.grad), held]
                shared[_ranks_of(parameter)].append(what)
        for ranks, what in shared.items():
            among = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
            topic = f"update/{self._step}/{number}/{among}"
            assert self._meeting is not None  # else it would not have been chosen
            answer = self._meeting.agree(topic, problem, AGREE_SECONDS, len(ranks), same=what)
            problem = answer or problem
        if problem:
            raise CanaryDeclined(problem)

    def _part(self, optimizer: torch.optim.Optimizer, watch: _Watch) -> PartOfUpdate:
        chosen = watch.chosen
        parameter = chosen.parameter
        group = optimizer.param_groups[chosen.group]
        assert watch.numbers is not None
        numbers = watch.numbers.cpu().numpy()
        here = local_of(parameter.detach())
        if watch.after is not None:
            numbers[FIELDS.index("later")] = float(_square_of_difference(here, watch.after))
        if watch.copied_to is not None:
            copied = local_of(watch.copied_to.detach())
            master = here.to(copied.dtype)
            numbers[FIELDS.index("copied")] = float(_square_of_difference(copied, master))
        return PartOfUpdate(
            name=chosen.name,
            optimizer=type(optimizer).__name__,
            dtype=dtype_name(parameter.dtype),
            shared=is_shared(parameter),
            learning_rate=_number(group.get("lr")),
            decay=_number(group.get("weight_decay")),
            copied_to="" if watch.copied_to is None else dtype_name(watch.copied_to.dtype),
            random=watch.random,
            alone=tuple(watch.trials),
            numbers=numbers,
            trials=tuple(float(one) for one in watch.distances),
        )


def _in_words(error: Exception) -> str:
    if isinstance(error, CanaryDeclined):
        return str(error)
    full = is_out_of_memory(error)
    return "it has found no memory" if full else f"something failed ({in_short(error)})"


def _smallest(watches: Iterable[_Watch]) -> list[_Watch]:
    """Return the smallest parameter of each group."""
    by_group: dict[int, _Watch] = {}
    for watch in sorted(watches, key=lambda w: -w.chosen.parameter.numel()):
        by_group[watch.chosen.group] = watch
    return list(by_group.values())


def _compute(
    watch: _Watch, lone: LoneOptimizer, held: UpdateInput, own: UpdateInput, *, alone: bool
) -> bool:
    """Compute a parameter's update again; return whether it depends on other parameters.

    ``held``: what it holds of the whole parameter. ``own``: what it holds of this rank's part.
    ``alone``: whether to find out if it depends on others. CanaryDeclined: it cannot be computed.
    """
    cuts = Cuts(watch.chosen.parameter, held.value)
    expected = lone.update(held)
    eps = torch.finfo(lone.computed_in or held.value.dtype).eps
    disturbed = lone.update(held.moved(eps), seed=1)
    if alone:
        beside = lone.update(held, replace(held, gradient=_OTHER * held.gradient))
        bound = 4 * (disturbed - expected).norm() + 1e-6 * held.value.norm()
        if bool((beside - expected).norm() > bound):
            return True
    for axes, part, rest in cuts.steps(held):
        watch.trials[axes] = rest.part(lone.update(part)).clone()
    watch.expected = cuts.part(expected).clone()
    watch.spread = _square_of_difference(cuts.part(disturbed), watch.expected)
    watch.moved = _square_of_difference(own.value, watch.before)
    watch.before.copy_(own.value)
    watch.random = lone.random
    watch.driven = (own.gradient != 0) & (own.value != 0)
    return False


def _square_of_difference(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared norm of the difference of two tensors, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=one.device)
    for a, b in zip(_pieces(one), _pieces(other), strict=True):
        total += (a.double() - b.double()).square().sum()
    return total


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor as matrices of some of its rows, as views."""
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(-1, 1)
    return torch.split(rows, max(1, _PIECE // max(rows.shape[1], 1)))


@torch.no_grad()
def _measure(watch: _Watch) -> None:
    """Measure an update that has happened."""
    assert watch.expected is not None and watch.driven is not None  # noqa: PT018
    watch.after = local_of(watch.chosen.parameter.detach()).clone()
    parts = (watch.before, watch.expected, watch.after, watch.driven)
    none = torch.zeros((), dtype=torch.float64, device=watch.before.device)
    totals = {name: none.clone() for name in FIELDS}
    for pieces in zip(*map(_pieces, parts), strict=True):
        for name, value in _sums(*pieces).items():
            totals[name] += value
    totals["spread"] += watch.spread
    totals["moved"] += watch.moved
    if watch.before.numel():
        totals["largest"] += watch.before.abs().amax()
    watch.numbers = torch.stack([totals[name] for name in FIELDS])
    watch.distances = [_square_of_difference(watch.after, t) for t in watch.trials.values()]
    watch.expected = watch.driven = None


def _sums(
    before: Tensor, expected: Tensor, after: Tensor, driven: Tensor
) -> dict[str, Tensor | int]:
    """Return sums over some rows of a parameter, by the names of ``FIELDS``."""
    before = before.double()
    wanted = expected.double() - before
    actual = after.double() - before
    apart = actual - wanted
    rows = (wanted != 0).any(1)
    return {
        "elements": before.numel(),
        "expected": wanted.square().sum(),
        "actual": actual.square().sum(),
        "product": (actual * wanted).sum(),
        "distance": apart.square().sum(),
        "weights": before.square().sum(),
        "along_weights": (apart * before).sum(),
        "turned_weights": (wanted * before).sum(),
        "resting": (driven & (wanted == 0)).sum(),
        "driven": driven.sum(),
        "rows": rows.sum(),
        "still_rows": (rows & ~(actual != 0).any(1)).sum(),
    }


def _storages(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    """Return the addresses of all tensors that belong to a training's optimizers."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for one in (parameter, parameter.grad, *state.values()):
                    if isinstance(one, Tensor) and one.layout is torch.strided:
                        found.add(address_of(one))
    return frozenset(found - {0})


def _ranks_of(parameter: Any) -> tuple[int, ...]:
    """Return the ranks that share a parameter."""
    return tuple(parameter.device_mesh.mesh.flatten().tolist())


def _form(value: Any) -> list[object]:
    """Return what ranks must agree on to gather a value together."""
    if not isinstance(value, Tensor):
        return [type(value).__name__]
    layout = value.placements if isinstance(value, DTensor) else None
    shape = tuple(value.shape) if layout is not None else value.numel() == 1
    return [shape, str(value.dtype), repr(layout)]


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return math.nan
