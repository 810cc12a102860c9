"""Reads parameters that are replicated over other axes than the data-parallel ones, some at a time.

The first step reads all of them, later ones a slot of them. Parameters are read before the step,
gradients at the optimizer's call, when their parts have been summed by hand. The readings go to the
root that compares the mesh.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.bus.pace import PACE
from rankscope.bus.probe import Channel, Job, Probe, StepEnd
from rankscope.bus.replicas import TRACE_WIDTH, StateKind
from rankscope.bus.words import dtype_name
from rankscope.errors import RankscopeError
from rankscope.evidence.mesh.director import AxisPart, over_axes
from rankscope.evidence.state.trace import PendingRows, TraceReader
from rankscope.gradients.digest import word_of
from rankscope.wrappers.fsdp2_mesh import MeshPlace, placements_of
from rankscope.wrappers.fsdp2_model import ManagedParameter
from rankscope.wrappers.labels import own

_log = logging.getLogger("rankscope")

_SLOT_EACH_STEP = PACE.state_in_turn  # steps of a run with a slot each
_MOST_AT_ONCE = 16  # parameters of a slot
_NUM_SLOTS = 64
_LEAST_BYTES = 1 << 18
_MOST_PENDING = 4  # steps that wait for their device


class MeshProbe(Probe):
    """Reads one rank's replicas over one mesh; a failure only ends the comparison over its axes."""

    def __init__(self, mesh: Any, channel: Channel, *, spacing: int) -> None:
        self._mesh: Any = None  # with the link to the root that compares it
        self._channel = channel  # link to this run's root
        self._spacing = spacing
        self._pending: deque[tuple[int, _PendingPart]] = deque()
        self._meter: _ReplicaMeter | None = None
        if mesh is not None:
            self._join(mesh)

    def _join(self, mesh: Any) -> None:
        self._mesh = mesh
        try:
            self._meter = _ReplicaMeter(mesh.place, spacing=self._spacing)
        except Exception as error:  # a model of an unknown kind
            self._end(error)

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Read parameters at the first forward pass of a step."""
        self._attempt(_ReplicaMeter.begin_step, step)

    def before_update(self, optimizer: Any) -> None:
        """Read gradients when ``optimizer.step`` is about to run."""
        self._attempt(_ReplicaMeter.see_applied)

    def collect(self, end: StepEnd) -> None:
        """Send the readings, as soon as they are on the host."""
        self._attempt(self._end_step, end)

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._attempt(_ReplicaMeter.abort)

    def close(self) -> None:
        """Send the rest, and close a guest's links."""
        self._attempt(self._hand_over, 0)
        if self._mesh is not None:
            self._mesh.close()

    def _attempt(self, work: Callable[..., object], *args: Any) -> None:
        """Call a function with the meter, unless something has failed."""
        if self._meter is None:
            return
        try:
            work(self._meter, *args)
        except Exception as error:  # the root may have ended before this rank
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._meter = None
        level = logging.DEBUG if isinstance(error, RankscopeError) else logging.WARNING
        words = "replicas over other axes of the mesh are not compared (%s: %s)"
        _log.log(level, words, type(error).__name__, error)

    def _end_step(self, meter: "_ReplicaMeter", end: StepEnd) -> None:
        if not end.comparable:
            meter.abort()
        part = meter.collect()
        if part is not None:
            self._pending.append((end.step, part))
        self._hand_over(meter, _MOST_PENDING)

    def _hand_over(self, meter: "_ReplicaMeter", most: int) -> None:
        """Send all but the last readings, up to ``most`` of them, that are not on the host."""
        while self._pending and (self._pending[0][1].ready or len(self._pending) > most):
            step, part = self._pending.popleft()
            content = part.read().pack()
            if self._mesh.is_guest:
                self._mesh.send("mesh", step, content)
            elif self._channel.has_room():
                self._channel.send("mesh", step, content)


class LateStages(MeshProbe):
    """Meets the other pipeline stages at the first update, and reads the weights they share."""

    def __init__(self, meet: Callable[[], Any], channel: Channel, *, spacing: int) -> None:
        super().__init__(None, channel, spacing=spacing)
        self._meet: Callable[[], Any] | None = meet
        self._step = 0

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Read parameters at the first forward pass of a step."""
        self._step = step
        super().begin_step(step, paused=paused)

    def before_update(self, optimizer: Any) -> None:
        """Meet the stages once, and read gradients when ``optimizer.step`` is about to run."""
        meet, self._meet = self._meet, None
        mesh = None if meet is None else meet()
        if mesh is not None and mesh.reaches:
            self._join(mesh)
            super().begin_step(self._step, paused=False)  # nothing has changed the parameters
        super().before_update(optimizer)


def make_probe(job: Job) -> tuple[Probe, ...]:
    """Return the probes of replicas over other axes, and of weights that pipeline stages share."""
    channel = job.channel
    meshes = [one for one in (channel.mesh, channel.stages) if one is not None and one.reaches]
    probes = [MeshProbe(mesh, channel, spacing=job.state_spacing) for mesh in meshes]
    if channel.meet_stages is not None:
        return *probes, LateStages(channel.meet_stages, channel, spacing=job.state_spacing)
    return tuple(probes)


@dataclass(frozen=True, slots=True)
class _PendingPart:
    """A rank's readings of a step, on their way to the host."""

    place: MeshPlace
    layout: int  # digest of all of its parameters
    cut: tuple[str, ...]  # axes over which some of them are cut
    chosen: Sequence[ManagedParameter]  # the parameters that were read
    types: Sequence[str]  # type of each one's gradient computation
    rows: tuple[PendingRows, PendingRows | None]  # values before the step; gradients, if any

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(rows is None or rows.ready for rows in self.rows)

    def read(self) -> AxisPart:
        """Wait for the device."""
        names = tuple(parameter.name for parameter in self.chosen)
        number = {name: at for at, name in enumerate(names)}
        digests_2N = np.zeros((2, len(names)), np.int64)
        norms_2N = np.full((2, len(names)), math.nan)
        sketches_2NK = np.zeros((2, len(names), TRACE_WIDTH), np.float32)
        for what, rows in enumerate(self.rows):
            if rows is None:
                continue
            trace = rows.read()
            at = [number[name] for name in trace.names]
            digests_2N[what, at] = trace.digests_N
            norms_2N[what, at] = trace.norms_N
            sketches_2NK[what, at] = trace.sketches_NK
        axes = list(self.place.axes)
        over = [over_axes(placements_of(parameter), axes) for parameter in self.chosen]
        return AxisPart(
            self.place.rank,
            self.place.axes,
            self.layout,
            self.cut,
            names,
            tuple(self.types),
            np.array(over, np.uint8).reshape(len(names), len(axes)),
            digests_2N,
            norms_2N,
            sketches_2NK,
            self.place.shared,
        )


class _ReplicaMeter:
    """Reads replicated parameters of one rank, on the training thread; no call waits."""

    def __init__(self, place: MeshPlace, *, spacing: int) -> None:
        self._place = place
        self._spacing = spacing  # steps from slot to slot, once a run has begun
        axes = list(place.axes)
        self._replicated = [p for p in place.parameters if any(over_axes(placements_of(p), axes))]
        self._slots = _dealt(self._replicated)
        over = [over_axes(placements_of(parameter), axes) for parameter in place.parameters]
        self._cut = tuple(a for at, a in enumerate(axes) if any(row[at] == 0 for row in over))
        self._layout = word_of("\n".join(map(_describe, place.parameters))) >> 1
        self._readers: dict[torch.device, TraceReader] = {}
        self._first: int | None = None
        self._step = -1
        self._clear()

    def _clear(self) -> None:
        self._chosen: Sequence[ManagedParameter] = ()
        self._types: list[str] = []
        self._parameters: PendingRows | None = None
        self._gradients: PendingRows | None = None

    def begin_step(self, step: int) -> None:
        """Read parameters at the first forward pass of a step, before anything changes them."""
        if step == self._step:
            return
        self._step = step
        self._clear()
        self._chosen = self._due(step)
        if self._chosen:
            self._types = [_type_of(parameter) for parameter in self._chosen]
            named = [(p.name, p.tensor) for p in self._chosen]
            self._parameters = self._read(StateKind.PARAMETER, named)

    def see_applied(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run; the last call counts."""
        all_gradients = [(p.name, p.tensor.grad) for p in self._chosen]
        gradients = [(name, gradient) for name, gradient in all_gradients if gradient is not None]
        if gradients:
            self._gradients = self._read(StateKind.APPLIED, gradients)

    def collect(self) -> _PendingPart | None:
        """Return the readings of the step, without waiting; None if there are none."""
        part = None
        if self._parameters is not None:
            rows = (self._parameters, self._gradients)
            part = _PendingPart(
                self._place, self._layout, self._cut, self._chosen, self._types, rows
            )
        self._clear()
        self._step = -1
        return part

    def abort(self) -> None:
        """Forget a step that was never finished; it begins anew."""
        if self._step == self._first:
            self._first = None
        self.collect()

    def _due(self, step: int) -> Sequence[ManagedParameter]:
        if not self._replicated:
            return ()
        if self._first is None:
            self._first = step
            return self._replicated
        number, between = (step, 0) if step < _SLOT_EACH_STEP else divmod(step, self._spacing)
        return () if between else self._slots[number % len(self._slots)]

    def _read(self, kind: StateKind, tensors: Sequence[tuple[str, Tensor]]) -> PendingRows:
        local = [(kind, name, own(tensor)) for name, tensor in tensors]
        device = local[0][2].device
        reader = self._readers.get(device)
        if reader is None:
            reader = self._readers[device] = TraceReader(device)
        return reader.read(local)


def _dealt(parameters: Sequence[ManagedParameter]) -> list[list[ManagedParameter]]:
    """Deal parameters out to slots, with about as many bytes each."""
    sizes = [own(p.tensor).nbytes for p in parameters]
    budget = max(sum(sizes) // _NUM_SLOTS, _LEAST_BYTES)
    slots: list[list[ManagedParameter]] = []
    left = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        left -= size
        if not slots or left < 0 or len(slots[-1]) == _MOST_AT_ONCE:
            slots.append([])
            left = budget - size
        slots[-1].append(parameter)
    return slots


def _describe(parameter: ManagedParameter) -> str:
    placed = sorted(placements_of(parameter).items())
    return f"{parameter.name} {tuple(parameter.tensor.shape)} {placed}"


def _type_of(parameter: ManagedParameter) -> str:
    device = parameter.group.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return dtype_name(cast or parameter.computed_in)
