"""The local gradient under FSDP2 (``fully_shard``), read just before each reduction.

FSDP2 accumulates gradients whole and undivided until it reduces them, and adds the result to the
sharded ``.grad``: the input of a reduction is this worker's gradient and nothing else, in every
layout and precision.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rankscope.bus.words import shortened
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.accumulator import AccumulatorAudit
from rankscope.wrappers.fsdp2_mesh import MeshPlace, log_other_mesh, mesh_place
from rankscope.wrappers.fsdp2_model import (
    ManagedParameter,
    ParameterGroup,
    ShardLookup,
    casting_policy,
    ends_backward,
    every_parameter,
    fsdp2_states,
    listen,
    managed_parameters,
    measure_shards,
    parameters_by_mesh,
    process_group_of,
    waits_by_hand,
)
from rankscope.wrappers.parts import GradientParts, MicroBatches
from rankscope.wrappers.passes import in_backward
from rankscope.wrappers.ranks import local_of, ranks_of
from rankscope.wrappers.tap import (
    GradientTap,
    LocalGradient,
    ReadReduced,
    TapPlan,
    guarded,
)
from rankscope.wrappers.wrapped import Wrapped, WrapperKind, no_whole

_log = logging.getLogger("rankscope")


class _Pass(Enum):
    """Where the backward pass is. One that raised stays open."""

    NONE = auto()
    NOTICED = auto()  # it has reached the model's output
    OPEN = auto()  # FSDP2 has begun it


@dataclass(slots=True)
class _Step:
    """What a step has seen so far; the next one begins with a new one."""

    forwards: int = 0
    backwards: int = 0  # without reductions by hand, after the passes
    trained: int = 0  # model outputs that backward passes which train have reached
    complete: bool = False  # a synchronising backward pass has ended
    settled: bool = False  # no forward pass waits for its backward pass after a reduction
    spoiled: bool = False  # what was measured is not the local gradient
    fresh: bool = True  # the gradients were empty before the first reduction
    micro_known: bool = True  # the norm of each micro-batch was measured
    reduced_read: bool = False

    @property
    def one_each(self) -> bool:
        """Whether each forward pass that trains had a backward pass of its own."""
        return self.backwards in (self.forwards, self.trained)


class FSDP2Tap(GradientTap):
    """Reads gradients under FSDP2.

    A step is a backward pass whose gradients are reduced over all workers. One that accumulates
    none (``torch.autograd.grad`` through the model, for adversarial examples, saliency or gradient
    penalties) does not count, even if FSDP2 reduces in it what earlier ones have accumulated; but
    under ``set_reduce_scatter_unused_params``, and since torch 2.15 under HSDP while a part of
    earlier gradients waits for its all-reduce, it reduces zeros as well, and it looks like a step.
    Gradients that are reduced in parts (HSDP without its all-reduce in all micro-batches but the
    last, a loss whose chunks each have a backward pass) add up as in
    :class:`~rankscope.wrappers.parts.GradientParts`: norms of such groups are estimates then.

    Layers gather their parameters, and so wait for all workers. A gradient that FSDP2 has not
    reduced is not in ``.grad``, and reaches no optimizer.

    The reduced gradient is left out in steps where it is unknown: something was in ``.grad``
    before, an all-reduce hook has changed it, it was moved to the CPU, or FSDP2 does not wait for
    it.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        plan: TapPlan,
    ) -> None:
        model = wrapped.wrapper
        parameters = wrapped.parameters
        super().__init__(plan)
        sketcher = plan.sketcher
        meshes = parameters_by_mesh(model)
        managed = next(each for each in meshes if any(p.name in parameters for p in each))
        self._batches = len(meshes[0][0].group.ranks)
        self._parameters = {parameter.inside: parameter for parameter in managed}
        self._watched = [p for p in managed if p.name in parameters]
        self._states = frozenset(fsdp2_states(model))
        self._groups = list(dict.fromkeys(parameter.group for parameter in managed))
        self.reduced_copies = self._groups[0].num_copies
        self._parts = GradientParts(sketcher)
        self._gradients = AccumulatedGradients(self._watched, sketcher, plan.reduced)
        self._micro = MicroBatches()
        self._watched_names = frozenset(parameters)
        self._left_out = self._announcing = False
        self._start_again()
        self._stops = listen(
            backward_begins=self._on_begin,
            before_reduce=self._see,
            backward_ends=self._close_backward,
            finalized=self._close_by_hand,
        )

    def _start_again(self) -> None:
        self._parts.reset()
        self._micro.reset()
        self._gradients.reset()
        self._read: set[str] = set()  # in this step
        self._read_now: set[str] = set()  # in this backward pass
        # Until their root's backward pass ends: whether the reduction makes it one that trains.
        self._reduced_now: dict[ParameterGroup, bool] = {}
        self._accumulated: dict[ManagedParameter, State] = {}  # not reduced
        self._pass = _Pass.NONE
        self._step = _Step()

    @property
    def summed_workers(self) -> float:
        """W where a divide factor of 1 was set, as for losses over all workers' tokens.

        A gradient of experts adds up the batches of all workers of the largest mesh, too.
        """
        return self._batches / self._groups[0].divisor

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training; one that recomputes activations does not count."""
        if in_backward() and not self._announcing:
            return
        if self._pass is _Pass.OPEN:  # it raised, and the training caught it
            self._start_again()
        self._pass = _Pass.NONE
        self._measure = measure
        if measure and not self._step.forwards:
            accumulated = any(p.unreduced is not None for p in self._watched)
            self._step.micro_known = self._sketcher.sketches and not accumulated
        self._step.forwards += 1

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output."""
        self._begin_backward(_Pass.NOTICED)
        self._reached.append(trained)
        known = self._step.settled or self._step.forwards == self._step.backwards + 1
        self._step.settled = False
        self._gradients.begin_pass(measure=self._measure and known, begun=bool(self._read_now))

    def notice_unannounced(self, announce: Callable[[], None]) -> None:
        """Note that the running backward pass has reached a forward pass in evaluation mode.

        Nothing comes of it when no parameter takes part, or one that was announced does as well.
        """
        if self._step.complete or self._step.forwards == self._step.backwards:
            self._announce = announce

    def _announce_evaluation(self) -> None:
        announce, self._announce = self._announce, None
        if announce is None:
            return
        accumulated = self._accumulated
        place, self._pass = self._pass, _Pass.NONE  # the step before may be complete
        self._announcing = True
        try:
            announce()
        finally:
            self._announcing = False
            self._pass, self._accumulated = place, accumulated

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has ended since the last :meth:`collect`."""
        return self._step.complete and self._pass is not _Pass.OPEN

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._pass is _Pass.OPEN and not in_backward()

    def _gradient(self) -> LocalGradient | None:
        if self._step.spoiled:
            return None
        reduced = self._gradients.reduced if self._step.reduced_read else None
        return LocalGradient(
            self._parts.totals(),
            None if reduced is None else reduced.clone(),
            self._micro_squared_norms(),
            norm_estimated=self._parts.estimated,
            accumulator_changes=self._gradients.collect() if self._step.one_each else None,
        )

    def remove(self) -> None:
        """Stop listening."""
        for stop in self._stops:
            stop()

    def _micro_squared_norms(self) -> Tensor | None:
        """Return the norms when each forward pass had one backward pass and all were seen."""
        if not self._step.micro_known or not self._step.one_each:
            return None
        if self._parts.estimated:
            return self._parts.part_squared_norms(self._step.backwards)
        return self._micro.squared_norms()

    @guarded
    def _on_begin(self, state: Any) -> None:
        if state in self._states:
            self._begin_backward(_Pass.OPEN)

    def _begin_backward(self, place: _Pass) -> None:
        if self._pass is _Pass.NONE:
            self._reached.clear()
        if self._pass is not _Pass.OPEN:
            self._pass = place

    @guarded
    def _see(
        self, fsdp_params: list[Any], unsharded_grads: list[Tensor], *rest: Any, **options: Any
    ) -> None:
        """Read the gradients of a group that is about to be reduced.

        On an accelerator this runs on the stream of the backward pass, on which FSDP2 itself is
        about to copy the gradients into the buffer of the collective. So they are ready there,
        and only later work on that stream uses their memory again.
        """
        if fsdp_params[0] not in self._parameters:
            return
        gradients = {
            self._parameters[inside]: gradient
            for inside, gradient in zip(fsdp_params, unsharded_grads, strict=True)
        }
        group = self._parameters[fsdp_params[0]].group
        trains = self._trains(gradients)
        if trains:
            self._announce_evaluation()
        self._reduced_now[group] = self._reduced_now.get(group, False) or trains
        if self._measure:
            known = {p: g for p, g in gradients.items() if p.name in self._watched_names}
            if len(known) < len(gradients):
                self._leave_out(p.name for p in gradients.keys() - known.keys())
            self._gradients.see_summed(known.items())
            self._measure_local(known)

    def _leave_out(self, names: Iterable[str]) -> None:
        """Log once that these parameters are trained and not measured."""
        named = sorted(names)
        if named and not self._left_out and dist.get_rank() == self._groups[0].ranks[0]:
            _log.warning(
                "%s and perhaps others were frozen when watch() was called, and train now: their "
                "gradients are not measured. To measure them, call watch() after they are unfrozen",
                shortened(named, 2),
            )
        self._left_out = True

    def _trains(self, gradients: dict[ManagedParameter, Tensor]) -> bool:
        """Return whether a reduction belongs to a step: not to a pass that has added nothing to it.

        Pipeline schedules reduce the sum of all backward passes by hand, after the last one.
        """
        if not self._accumulated or not in_backward():
            return True
        return any(self._accumulated.get(p) != state_of(g) for p, g in gradients.items())

    def _measure_local(self, gradients: dict[ManagedParameter, Tensor]) -> None:
        for parameter in gradients:
            name = parameter.name
            if name in self._read:
                self._step.spoiled |= not self._sketcher.sketches  # norms alone do not add up
            else:
                self._step.spoiled |= parameter.group.half_reduced
                self._step.fresh &= parameter.tensor.grad is None
        names = {parameter.name for parameter in gradients}
        self._read |= names
        self._read_now |= names
        self._parts.measure_many([(p.name, gradient) for p, gradient in gradients.items()])

    @guarded
    def _close_by_hand(self, state: Any) -> None:
        """Close the backward passes of a step whose reductions the training has waited for."""
        if not ends_backward(state):
            self._close_backward(state, settled=True)

    @guarded
    def _close_backward(self, state: Any, *, settled: bool = False) -> None:
        """Close a backward pass, after the reductions if it has any.

        Unless they are ``settled``, the training may wait for them by hand, later.
        """
        if state in self._states:
            self._end_pass(state, settled=settled)
            self._announce = None
            self._pass = _Pass.NONE  # last: Ctrl-C in between leaves an aborted pass

    def _end_pass(self, state: Any, *, settled: bool) -> None:
        groups = frozenset(group for group in self._groups if group.belongs_to(state))
        reduced = {}
        if settled or not waits_by_hand(state):
            reduced = {g: self._reduced_now.pop(g) for g in groups & self._reduced_now.keys()}
        if not self._has_accumulated(groups) and not any(reduced.values()):
            self._gradients.drop_pass(reduced=self._close_part())
            return  # the training wanted gradients of other tensors than parameters
        self._announce_evaluation()
        again = not (self._reached or in_backward())  # a schedule reduces after its passes
        for trained in self._reached:
            trained()
        self._step.trained += len(self._reached)
        self._reached.clear()
        self._step.backwards += not again
        synchronised = any(group.synchronises for group in reduced)
        self._step.settled = synchronised and self._step.one_each
        self._step.complete |= synchronised
        if synchronised:
            self._see_reduced()
        if self._measure:
            self._measure_pass(synchronised=synchronised, again=again)

    def _measure_pass(self, *, synchronised: bool, again: bool) -> None:
        if not self._close_part() and not synchronised:
            self._measure_unreduced()
            return
        if synchronised and self._step.backwards > 1 and not again:
            self._micro.add(self._parts.totals(), last=True)
        self._gradients.end_reduced(self._measure_reduced() if synchronised else (), again=again)

    def _close_part(self) -> bool:
        """Return whether the backward pass has reduced something that was measured."""
        if not self._read_now:
            return False
        self._parts.close()
        self._read_now.clear()
        return True

    def _has_accumulated(self, groups: frozenset[ParameterGroup]) -> bool:
        """Return whether a backward pass has left gradients that it has not reduced."""
        before = {p: seen for p, seen in self._accumulated.items() if p.group in groups}
        if not before and all(group.reduces for group in groups):
            return False
        unreduced = [(p, p.unreduced) for p in self._watched if p.group in groups]
        now = {p: state_of(gradient) for p, gradient in unreduced if gradient is not None}
        others = {p: seen for p, seen in self._accumulated.items() if p not in before}
        self._accumulated = others | now
        return any(before.get(p) != seen for p, seen in now.items())

    def _measure_unreduced(self) -> None:
        """Measure the sum so far, of which nothing was reduced, for its norm."""
        unreduced = [p for p in self._watched if p.unreduced is not None]
        may_be_partial = any(p.is_dtensor for p in unreduced)  # under tensor parallelism
        self._step.micro_known &= not may_be_partial
        totals = self._gradients.measure_unreduced() if self._step.micro_known else None
        if totals is not None:
            self._micro.add(totals, last=False)
        self._gradients.end_unreduced(totals, self._accumulated)

    def _measure_reduced(self) -> list[ManagedParameter]:
        """Return the parameters whose reduced gradient was measured."""
        read = [p for p in self._watched if p.name in self._read]
        self._step.reduced_read = self._step.fresh and self._gradients.measure_reduced(read)
        return read if self._step.reduced_read else []


class _Before(Enum):
    """Whether the gradients before a pass are known: from UNSEEN to SEEN or LATE, or through both.

    The end of the pass leads back to UNSEEN.
    """

    UNSEEN = auto()  # the pass has not reached the model's output, or is not compared
    SEEN = auto()
    LATE = auto()  # it had reached a parameter by then


State = tuple[int, int]
"""Address and version of a gradient: they change when something is accumulated into it."""


class AccumulatedGradients:
    """Measures gradients after backward passes, and compares them with those before the next ones.

    A pass that has reached a parameter before the model's output (a loss that uses a weight again)
    is not compared. One that has reduced some by then is known at once. Otherwise, since autograd
    adds to a gradient once in a pass: a gradient that has changed by then, and does not change
    afterwards, was reached before.
    """

    def __init__(
        self, parameters: Collection[ManagedParameter], sketcher: Sketcher, read: ReadReduced
    ) -> None:
        self._parameters = parameters
        self._sketcher = sketcher
        self._read = read
        # totals of this rank's shards; None where they are not to be read
        self.reduced = None if read is ReadReduced.OFF else sketcher.new_totals()
        self._audit = AccumulatorAudit({p.name: p.tensor for p in parameters}, sketcher)
        self._scratch: GradientTotals | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._audit.reset()
        self._left: GradientTotals | None = None  # after the last pass, if the next is compared
        self._unreduced: Mapping[ManagedParameter, State] = {}
        self._changed: dict[ManagedParameter, State] = {}  # before the pass that runs
        self._before = _Before.UNSEEN

    def measure_unreduced(self) -> GradientTotals:
        """Measure the gradients that wait for their reduction."""
        totals = self._empty_scratch()
        found = [(p.name, p.unreduced, 0) for p in self._parameters]
        self._sketcher.measure_many([(n, g, at) for n, g, at in found if g is not None], totals)
        return totals

    def measure_reduced(self, parameters: Collection[ManagedParameter]) -> bool:
        """Measure this rank's shards, for which the current stream waits, if all are there."""
        readable = all(map(self._is_readable, parameters))
        if readable and self.reduced is not None:
            self.reduced.reset()
            self._measure_shards(parameters, self._read, self.reduced)
        return readable

    def begin_pass(self, *, measure: bool, begun: bool) -> None:
        """Measure the gradients, as soon as a backward pass has reached the model's output.

        It may have reduced some already (``begun``).
        """
        if self._before is not _Before.UNSEEN or not measure or self._left is None:
            return
        self._before = _Before.LATE if begun else _Before.SEEN
        if not begun:
            waiting = self._parameters if self._unreduced else ()
            now = {p: state_of(g) for p in waiting if (g := p.unreduced) is not None}
            self._changed = {p: s for p, s in now.items() if s != self._unreduced.get(p)}
            self._audit.begin_pass(self._left, measure=True, begun=False)

    def see_summed(self, gradients: Iterable[tuple[ManagedParameter, Tensor]]) -> None:
        """Note whole gradients to which the pass adds no more."""
        if self._changed and any(self._changed.get(p) == state_of(g) for p, g in gradients):
            self._before = _Before.LATE

    def drop_pass(self, *, reduced: bool) -> None:
        """Note that the pass has accumulated nothing: the training wanted other gradients.

        It may have reduced the sum of earlier ones.
        """
        self._audit.drop_pass()
        self._changed = {}
        self._before = _Before.UNSEEN
        if reduced:
            self._left = None

    def end_unreduced(
        self,
        totals: GradientTotals | None,  # of measure_unreduced; None if nothing was measured
        states: Mapping[ManagedParameter, State],
    ) -> None:
        """End a pass that has left gradients to be reduced later."""
        self._close()
        self._left = totals
        self._unreduced = states
        self._audit.end_pass(None if totals is None else self._read_unreduced)

    def end_reduced(
        self,
        parameters: Collection[ManagedParameter],  # whose shards measure_reduced has just measured
        *,
        again: bool,  # it has ended before the reduction
    ) -> None:
        """End a pass that has reduced gradients."""
        self._close()
        self._left = self.reduced if parameters else None
        read = partial(self._measure_shards, parameters, ReadReduced.NORM)
        self._audit.end_pass(None if self._left is None else read, again=again)

    def collect(self) -> Tensor | None:
        """Return the step's changes: see :meth:`AccumulatorAudit.collect`."""
        return self._audit.collect()

    def _close(self) -> None:
        waiting = ((p, p.unreduced) for p in self._changed)
        self.see_summed([(p, g) for p, g in waiting if g is not None])
        if self._before is _Before.LATE:
            self._audit.drop_pass()
        self._changed = {}
        self._unreduced = {}
        self._before = _Before.UNSEEN

    def _read_unreduced(self, into: GradientTotals) -> None:
        there = [(p.name, p.unreduced) for p in self._parameters]
        self._sketcher.measure_norms([(n, g) for n, g in there if g is not None], into)

    def _is_readable(self, parameter: ManagedParameter) -> bool:
        shard = parameter.reduced
        here = shard is not None and shard.device == self._sketcher.device
        return here and parameter.group.reduced_is_readable

    def _measure_shards(
        self, parameters: Collection[ManagedParameter], read: ReadReduced, into: GradientTotals
    ) -> None:
        """Add the totals of shards, as those of the mean over the workers."""
        for scale in {p.group.reduced_scale for p in parameters}:
            totals = into if scale == 1 else self._empty_scratch()
            self._add_shards(
                [p for p in parameters if p.group.reduced_scale == scale], read, totals
            )
            if scale != 1:
                totals.scale(scale)
                into.add(totals)

    def _add_shards(
        self, parameters: Collection[ManagedParameter], read: ReadReduced, into: GradientTotals
    ) -> None:
        shards = [(p, shard) for p in parameters if (shard := p.reduced) is not None]
        if read is ReadReduced.NORM:
            self._sketcher.measure_norms([(p.name, shard) for p, shard in shards], into)
        else:
            measure_shards(self._sketcher, [(p.name, s, p.place) for p, s in shards], into)

    def _empty_scratch(self) -> GradientTotals:
        if self._scratch is None:
            self._scratch = self._sketcher.new_totals()
        self._scratch.reset()
        return self._scratch


def state_of(gradient: Tensor) -> State:
    """Return the address and version of a gradient, which change when something is added to it.

    Of a DTensor its own version counts: autograd leaves that of its local part alone.
    """
    return local_of(gradient).data_ptr(), gradient._version


_TYPES = ("param_dtype", "reduce_dtype", "output_dtype")

FSDP2 = WrapperKind("FSDP2", "fully_shard got a mesh", FSDP2Tap, no_canary=no_whole("FSDP2"))


@dataclass(frozen=True, slots=True)
class FSDP2Model(Wrapped):
    """A model to which ``fully_shard`` was applied, or to parts of it."""

    def every_parameter(self) -> dict[str, Tensor]:
        """Return all shards by canonical name, also where the model holds gathered parameters."""
        meshes = parameters_by_mesh(self.wrapper)
        return {p.name: p.tensor for managed in meshes for p in managed}

    def lookup(self) -> Callable[[nn.Module, str], Tensor | None] | None:
        """Return how to find the shard that a module's parameter stands for."""
        return ShardLookup(self.wrapper, ranks_of(self.group))

    def settings(self) -> Mapping[str, object]:
        """Return the types of the ``MixedPrecisionPolicy`` of the root."""
        if not isinstance(self.wrapper, FSDPModule):
            return {}
        policy = casting_policy(self.wrapper)
        return {name: getattr(policy, name, None) for name in _TYPES}

    def gradient_types(self) -> Mapping[str, Collection[torch.dtype]]:
        """Return by parameter its own type and that in which FSDP2 means to reduce."""
        sums = {p.name: p.summed_in for p in every_parameter(self.wrapper)}
        return {n: (p.dtype, sums.get(n, p.dtype)) for n, p in self.parameters.items()}


def find_fsdp2(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> Wrapped:
    """Return a model under ``fully_shard``; its workers are those of one of its meshes.

    Parameters that it ignores are left out: nothing averages their gradients.
    """
    workers = () if process_group is None else ranks_of(process_group)
    managed = managed_parameters(model, workers)
    group = managed[0].group
    first, *others = parameters_by_mesh(model)
    chosen = first[0].name == managed[0].name
    if chosen:
        for other in others:
            log_other_mesh(first, other)
    return FSDP2Model(
        FSDP2,
        model,
        {p.name: p.tensor for p in managed if p.tensor.requires_grad},
        process_group or process_group_of(group),
        group.device,  # of gradients; under CPU offloading the parameters live elsewhere
        sharded=True,
        replica=group.replica,
        mesh=_find_mesh(model) if chosen else None,
        inside=model,
    )


def _find_mesh(model: nn.Module) -> MeshPlace | None:
    try:
        return mesh_place(model)
    except Exception as error:  # whatever the meshes of its parameters are
        _log.debug("other axes of the mesh are unknown: %r", error)
        return None
