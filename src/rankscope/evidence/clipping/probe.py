"""Listens to the training's clipping between the reduction and the optimizer's call."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope.bus.probe import Awaited, Job, MessagePart, Pending, Probe, Ready, StepEnd
from rankscope.gradients.host import Numbers, copy_numbers
from rankscope.wrappers.clipping import CLIP, NORM, VALUE, rounding_of
from rankscope.wrappers.labels import is_spread, own
from rankscope.wrappers.tap import Guarded, guarded

_EPSILON = 1e-6  # torch adds it to the norm
_MOST_LISTS = 64


class _Listed(NamedTuple):
    """A list of parameters that was clipped: their ids, and the ids of those with a gradient."""

    all: frozenset[int]
    with_gradient: frozenset[int]


class _Call(NamedTuple):
    """A clipping call; ``given`` is the norm ``total`` on its way; ``idle``: it scales nothing."""

    listed: _Listed
    limit: float
    total: Any
    given: Numbers | None
    idle: bool


class ClippingProbe(Probe):
    """Records the call that clips all measured gradients of a step, if there is just one.

    Calls with the same limit and the same norm, for a part of the parameters each, count as one.
    ``whole``: whether nothing of the model is on ranks that are not compared; ``by_loop``: whether
    the training's own loop reduces.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        guard: Guarded,
        *,
        whole: bool,
        by_loop: bool = False,
    ) -> None:
        measured = list(parameters)
        self._guarded = guard
        self._measured = frozenset(map(id, measured))
        self._whole = whole
        self._by_loop = by_loop
        self._rounding = rounding_of(measured)
        self._num_between = 0  # reductions of the step whose result was clipped before the last one
        self._lists: dict[tuple[int, int, int], _Listed] = {}
        self._clear()
        self._stops: list[Callable[[], object]] = [
            relay.subscribe(before=listener)
            for relay, listener in (
                (NORM, self._see_norm),
                (CLIP, self._see_clip),
                (VALUE, self._see_value),
            )
            if relay.exists
        ]

    def _clear(self) -> None:
        self._updated = False
        self._value = math.nan  # the smallest limit of elements
        self._orders: set[float] = set()
        self._num_normed = 0
        self._calls: list[_Call] = []

    def see_reduced(self) -> None:
        """Forget what was clipped before the reduction, but not that it was.

        What a loop has reduced is read at its update: whether elements were clipped first is known,
        and not on which side of the reduction.
        """
        self._num_between += bool(self._calls) and not self._updated
        value = self._value if self._by_loop and not self._updated else math.nan
        self._clear()
        self._value = value

    def before_update(self, optimizer: Any) -> None:
        """Ignore what is clipped later: it does not change this update."""
        self._updated = True

    @guarded
    def _see_norm(self, tensors: Any, norm_type: Any = 2.0, *args: Any, **more: Any) -> None:
        if not self._updated:
            self._orders.add(float(norm_type))
            self._num_normed += 1 if isinstance(tensors, Tensor) else len(tensors)

    @guarded
    def _see_clip(
        self, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **more: Any
    ) -> None:
        if self._updated:
            return
        known = isinstance(total_norm, Tensor) and not is_spread(total_norm)
        given = copy_numbers(own(total_norm).reshape(-1), torch.float64) if known else None
        limit = float(max_norm) if isinstance(max_norm, Real) else math.nan
        several = [parameters] if isinstance(parameters, Tensor) else parameters
        listed = self._listed(several)
        idle = not listed.with_gradient and all(each.grad is None for each in several)
        self._calls.append(_Call(listed, limit, total_norm, given, idle))

    @guarded
    def _see_value(self, parameters: Any, clip_value: Any, *args: Any, **more: Any) -> None:
        if self._updated or not isinstance(clip_value, Real):
            return
        several = [parameters] if isinstance(parameters, Tensor) else parameters
        if self._listed(several).all & self._measured:
            self._value = min(float(clip_value), self._value)  # the first argument if it is NaN

    def _listed(self, parameters: Sequence[Tensor]) -> _Listed:
        """Return which parameters a list holds; a list like an earlier one is not read again."""
        ends = (id(parameters[0]), id(parameters[-1])) if parameters else (0, 0)
        key = (len(parameters), *ends)
        if key not in self._lists:
            if len(self._lists) >= _MOST_LISTS:
                self._lists.clear()
            with_gradient = frozenset(id(p) for p in parameters if p.grad is not None)
            self._lists[key] = _Listed(frozenset(map(id, parameters)), with_gradient)
        return self._lists[key]

    def collect(self, end: StepEnd) -> Pending:
        """Return the step's clipping."""
        calls = self._calls
        orders = self._orders
        num_normed = self._num_normed
        value = self._value
        self._clear()
        values = {
            "clip_value": value,
            "clip_rounding": self._rounding,
            "clips_between": float(self._num_between),
            "clips_of_nothing": 0.0,
            "summed_workers": end.summed_workers,
        }
        self._num_between = 0
        if not calls:
            return Ready(MessagePart(values))
        first, *others = calls
        one = all(call.total is first.total and call.limit == first.limit for call in others)
        clipped = first.listed.all.union(*(call.listed.all for call in others))
        if not (one and clipped >= self._measured):
            idle = [call for call in calls if call.idle and call.given is not None]
            if not idle or any(call.listed.with_gradient & self._measured for call in calls):
                return Ready(MessagePart(values))
            return Awaited(
                [call.given for call in idle if call.given is not None],
                partial(_count_idle, values, idle),
            )
        values["clip_limit"] = first.limit
        if len(orders) == 1:
            values["clip_order"] = next(iter(orders))
            num_clipped = sum(len(call.listed.with_gradient) for call in calls)
            values["clip_left_out"] = num_clipped - num_normed
        with_gradient = first.listed.with_gradient.union(*(c.listed.with_gradient for c in others))
        values["clip_whole"] = float(self._whole and with_gradient <= self._measured)
        if first.given is None:
            return Ready(MessagePart(values))
        return Awaited([first.given], partial(_read, values, first.limit, first.given))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._clear()
        self._num_between = 0

    def close(self) -> None:
        """Listen no more."""
        for stop in self._stops:
            stop()


def _count_idle(values: dict[str, float], idle: Sequence[_Call]) -> MessagePart:
    """Wait for the norms of calls that scale nothing; count those that should have."""
    above = [call for call in idle if call.given is not None and call.given.numpy()[0] > call.limit]
    return MessagePart({**values, "clips_of_nothing": float(len(above))})


def _read(values: dict[str, float], limit: float, given: Numbers) -> MessagePart:
    """Wait for the norm."""
    total = float(given.numpy()[0])
    factor = min(limit / (total + _EPSILON), 1.0) if total >= 0 else math.nan
    return MessagePart({**values, "clip_factor": factor})


def make_probe(job: Job) -> ClippingProbe | None:
    """Return the probe of clipping; None where state is not compared exactly."""
    if not job.exact:
        return None
    wrapped = job.wrapped
    everyone = wrapped.group.size() == torch.distributed.get_world_size()  # no other stages
    whole = wrapped.mesh is None and everyone
    parameters = wrapped.parameters.values()
    return ClippingProbe(parameters, job.guard, whole=whole, by_loop=wrapped.kind.by_loop)
