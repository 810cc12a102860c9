"""Reads parameters that are replicated over other axes than the data-parallel ones, some at a time.

The first step reads all of them, later ones a slot of them. Parameters are read before the step,
gradients at the optimizer's call, when their parts have been summed by hand.
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

_SLOT_EACH_STEP = PACE.state_in_turn  # steps of a run with a slot each
_MOST_AT_ONCE = 16  # parameters of a slot
_NUM_SLOTS = 64
_LEAST_BYTES = 1 << 18


class PendingPart:
    """A rank's readings of a step, on their way to the host.

    Args:
        place: The rank's place in the mesh.
        layout: Digest of all of its parameters.
        cut: The axes over which some of them are cut.
        chosen: The parameters that were read.
        types: Type of each one's gradient computation.
        parameters: Their values before the step.
        gradients: Gradients of those that have one.
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
        self._place = place
        self._layout = layout
        self._cut = cut
        self._chosen = chosen
        self._types = types
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
            self._place.shared,
        )


class ReplicaMeter:
    """Reads replicated parameters of one rank; all calls come on the training thread.

    No call waits for the device, or changes anything.

    Args:
        place: The rank's place in the mesh.
        spacing: Steps from slot to slot, once a run has begun.
    """

    def __init__(self, place: MeshPlace, *, spacing: int) -> None:
        self._place = place
        self._spacing = spacing
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
            self._parameters = self._read(
                StateKind.PARAMETER, [(p.name, p.tensor) for p in self._chosen]
            )

    def see_applied(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run; the last call counts."""
        all_gradients = [(p.name, p.tensor.grad) for p in self._chosen]
        gradients = [(name, gradient) for name, gradient in all_gradients if gradient is not None]
        if gradients:
            self._gradients = self._read(StateKind.APPLIED, gradients)

    def collect(self) -> PendingPart | None:
        """Return the readings of the step, without waiting; None if there are none."""
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
        number, between = (step, 0) if step < _SLOT_EACH_STEP else divmod(step, self._spacing)
        return () if between else self._slots[number % len(self._slots)]

    def _read(self, kind: StateKind, tensors: Sequence[tuple[str, Tensor]]) -> PendingRows:
        local = [(kind, name, _local(tensor)) for name, tensor in tensors]
        device = local[0][2].device
        reader = self._readers.get(device)
        if reader is None:
            reader = self._readers[device] = TraceReader(device)
        return reader.read(local)


def _dealt(parameters: Sequence[ManagedParameter]) -> list[list[ManagedParameter]]:
    """Deal parameters out to slots, with about as many bytes each."""
    sizes = [_local(p.tensor).nbytes for p in parameters]
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
    return str(cast or parameter.computed_in).removeprefix("torch.")


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
