"""Reads parameters that are replicated over other axes than the data-parallel ones, some at a time.

All of them are read in the first step, so that it is known where they begin. Later they take
turns. Parameters are read before the step, gradients when the optimizer is about to get them:
whatever adds up the parts of a gradient by hand has done so by then.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.bus.pace import PACE
from rankscope.bus.replicas import TRACE_WIDTH, StateKind
from rankscope.evidence.mesh.part import AxisPart, over_axes
from rankscope.evidence.state.trace import PendingRows, TraceReader
from rankscope.gradients.digest import word_of
from rankscope.wrappers.fsdp2_mesh import MeshPlace, placements_of
from rankscope.wrappers.fsdp2_model import ManagedParameter

_log = logging.getLogger("rankscope")

_EACH_UNTIL = PACE.state_in_turn  # steps of a run that have a turn each
_MOST_AT_ONCE = 16  # parameters of a turn
_TURNS = 64
_LEAST_BYTES = 1 << 18


class PendingPart:
    """What a rank has read of a step, on its way to the host.

    Args:
        place: The rank's place in the mesh.
        layout: Digest of all of its parameters.
        cut: The axes over which some of them are cut.
        chosen: The parameters that were read.
        types: In which each one's gradient was computed.
        parameters: Of all of them, before the step.
        gradients: Of those that have one.
    """

    def __init__(
        self,
        place: MeshPlace,
        layout: int,
        cut: tuple[str, ...],
        chosen: Sequence[ManagedParameter],
        types: Sequence[str],
        parameters: PendingRows,
        gradients: PendingRows | None,
    ) -> None:
        self._place, self._layout, self._cut = place, layout, cut
        self._chosen, self._types = chosen, types
        self._rows = (parameters, gradients)

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(rows is None or rows.ready for rows in self._rows)

    def read(self) -> AxisPart:
        """Wait for the device."""
        names = tuple(parameter.name for parameter in self._chosen)
        number = {name: at for at, name in enumerate(names)}
        digests_2N = np.zeros((2, len(names)), np.int64)
        norms_2N = np.full((2, len(names)), math.nan)
        sketches_2NK = np.zeros((2, len(names), TRACE_WIDTH), np.float32)
        for what, rows in enumerate(self._rows):
            if rows is None:
                continue
            trace = rows.read()
            at = [number[name] for name in trace.names]
            digests_2N[what, at] = trace.digests_N
            norms_2N[what, at] = trace.norms_N
            sketches_2NK[what, at] = trace.sketches_NK
        axes = list(self._place.axes)
        over = [over_axes(placements_of(parameter), axes) for parameter in self._chosen]
        return AxisPart(
            self._place.rank,
            self._place.axes,
            self._layout,
            self._cut,
            names,
            tuple(self._types),
            np.array(over, np.uint8).reshape(len(names), len(axes)),
            digests_2N,
            norms_2N,
            sketches_2NK,
        )


class ReplicaMeter:
    """Reads replicated parameters of one rank; all calls come on the training thread.

    No call waits for the device, or changes anything.

    Args:
        place: The rank's place in the mesh.
        spacing: Steps from turn to turn, once a run has begun.
    """

    def __init__(self, place: MeshPlace, *, spacing: int) -> None:
        self._place, self._spacing = place, spacing
        axes = list(place.axes)
        self._replicated = [p for p in place.parameters if any(over_axes(placements_of(p), axes))]
        self._turns = _dealt(self._replicated)
        over = [over_axes(placements_of(parameter), axes) for parameter in place.parameters]
        self._cut = tuple(a for at, a in enumerate(axes) if any(row[at] == 0 for row in over))
        self._layout = word_of("\n".join(map(_described, place.parameters))) >> 1
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
            self._parameters = self._read(
                StateKind.PARAMETER, [(p.name, p.tensor) for p in self._chosen]
            )

    def see_applied(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run; the last call counts."""
        held = [(p.name, p.tensor.grad) for p in self._chosen]
        given = [(name, gradient) for name, gradient in held if gradient is not None]
        if given:
            self._gradients = self._read(StateKind.APPLIED, given)

    def collect(self) -> PendingPart | None:
        """Return what was read since the step began, without waiting; None if nothing was."""
        part = None
        if self._parameters is not None:
            part = PendingPart(
                self._place,
                self._layout,
                self._cut,
                self._chosen,
                self._types,
                self._parameters,
                self._gradients,
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
        turn, between = (step, 0) if step < _EACH_UNTIL else divmod(step, self._spacing)
        return () if between else self._turns[turn % len(self._turns)]

    def _read(self, kind: StateKind, tensors: Sequence[tuple[str, Tensor]]) -> PendingRows:
        local = [(kind, name, _local(tensor)) for name, tensor in tensors]
        device = local[0][2].device
        reader = self._readers.get(device)
        if reader is None:
            reader = self._readers[device] = TraceReader(device)
        return reader.read(local)


def _dealt(parameters: Sequence[ManagedParameter]) -> list[list[ManagedParameter]]:
    """Deal parameters out to turns, with about as many bytes each."""
    sizes = [_local(p.tensor).nbytes for p in parameters]
    budget = max(sum(sizes) // _TURNS, _LEAST_BYTES)
    turns: list[list[ManagedParameter]] = []
    left = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        left -= size
        if not turns or left < 0 or len(turns[-1]) == _MOST_AT_ONCE:
            turns.append([])
            left = budget - size
        turns[-1].append(parameter)
    return turns


def _described(parameter: ManagedParameter) -> str:
    placed = sorted(placements_of(parameter).items())
    return f"{parameter.name} {tuple(parameter.tensor.shape)} {placed}"


def _type_of(parameter: ManagedParameter) -> str:
    device = parameter.group.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return str(cast or parameter.computed_in).removeprefix("torch.")


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
