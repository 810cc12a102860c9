"""Sends one rank's loss, label tokens and samples to the root that compares a mesh's axes."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rankscope.bus.pace import PACE
from rankscope.bus.probe import Channel, Job, MessagePart, Probe
from rankscope.bus.words import dtype_name
from rankscope.evidence.axes.director import AxesShare, Squares
from rankscope.gradients.host import Numbers, copy_numbers
from rankscope.stats.arrays import Floats, digest_of
from rankscope.stats.rounding import UNIT_ROUNDOFF
from rankscope.wrappers.clipping import rounding_of
from rankscope.wrappers.fsdp2_mesh import placements_of, sequence_lines
from rankscope.wrappers.fsdp2_model import ManagedParameter, every_parameter
from rankscope.wrappers.ranks import local_of, ranks_of

_log = logging.getLogger("rankscope")

NAME = "axes"

_MODEL = ("tp", "tensor", "mp", "model")  # names of axes over which layers are cut by hand
_STEPS_IN_A_ROW = PACE.state_in_turn
_MOST_LOSSES = 256


class AxesProbe(Probe):
    """Sends one rank's share of a step; all calls come on the training thread."""

    def __init__(
        self,
        mesh: Any,  # with the link to the root that compares it; None inside one run
        channel: Channel,  # link to this run's root
        *,
        lines: dict[str, tuple[int, ...]],  # ranks along each axis
        cut: tuple[str, ...],  # axes over which the model is cut
        sequences: tuple[str, ...],  # axes over which sequences are cut
        dtype: str,  # coarsest type in which the model computes, without autocast
        device: str,  # kind of device that computes
        spacing: int,  # steps from one share to the next, once a run has begun
        squares: "_SquareMeter | None",  # None inside one run, which compares gradients by itself
    ) -> None:
        self._mesh = mesh
        self._channel = channel
        self._lines = lines
        self._cut = cut
        self._sequences = sequences
        self._dtype = self._given = dtype
        self._device = device
        self._spacing = spacing
        self._rank = torch.distributed.get_rank()
        self._ended = False
        self._squares = squares
        self._read: dict[int, _Reading | None] = {}
        self._step = 0

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note the type that autocast chooses."""
        self._step = step
        cast = torch.is_autocast_enabled(self._device)
        chosen = torch.get_autocast_dtype(self._device) if cast else self._given
        self._dtype = dtype_name(chosen)

    def before_update(self, optimizer: Any) -> None:
        """Read the squares of the gradients, unless several optimizers take a part of them each."""
        if self._squares is None or not self._is_due(self._step):
            return
        try:
            several = self._step in self._read
            self._read[self._step] = None if several else self._squares.read()
        except Exception as error:  # whatever the gradients are
            self._squares = None
            _log.debug("the norm over a mesh is not compared: %r", error)

    def _is_due(self, step: int) -> bool:
        return not self._ended and (step < _STEPS_IN_A_ROW or step % self._spacing == 0)

    def on_message(self, step: int, part: MessagePart) -> None:
        """Send the share of a step."""
        reading = self._read.pop(step, None)
        if not self._is_due(step):
            return
        try:
            content = self._share(part, reading).pack()
            if self._mesh is not None and self._mesh.is_guest:
                self._mesh.send(NAME, step, content)
            elif self._channel.has_room():
                self._channel.send(NAME, step, content)
        except Exception as error:  # the root may have ended before this rank
            self._ended = True
            _log.debug("losses along other axes of the mesh are not compared: %r", error)

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._read.pop(self._step, None)

    def _share(self, part: MessagePart, reading: "_Reading | None") -> AxesShare:
        losses = np.frombuffer(bytes(part.arrays.get("losses_U", b"")), np.float64)
        weights = np.frombuffer(bytes(part.arrays.get("weights_U", b"")), np.float64)
        samples = bytes(part.arrays.get("samples_B", b""))
        rows = len(samples) // np.dtype(np.int64).itemsize
        length = part.values.get("sequence_length", math.nan)
        weight = float(weights.sum()) if len(weights) else math.nan
        return AxesShare(
            rank=self._rank,
            lines=self._lines,
            cut=self._cut,
            sequences=self._sequences,
            losses=tuple(losses[:_MOST_LOSSES].tolist()),
            weight=weight if math.isfinite(weight) else None,
            samples=digest_of(samples),
            rows=rows,
            tokens=rows * length if math.isfinite(length) else 0.0,
            dtype=self._dtype,
            random=None if "rng_digest" not in part.values else int(part.values["rng_digest"]),
            squares=None
            if reading is None or self._squares is None
            else self._squares.squares(reading),
        )


def make_probe(job: Job) -> AxesProbe | None:
    """Return the probe of what should agree along other axes; None without any."""
    if not job.exact or job.local_steps:
        return None
    try:
        return _make(job)
    except Exception as error:  # whatever the meshes of its parameters are
        _log.debug("losses along other axes of the mesh are not compared: %r", error)
        return None


def _make(job: Job) -> AxesProbe | None:
    mesh = job.channel.mesh
    place = job.wrapped.mesh
    outer = {} if place is None or mesh is None or not mesh.reaches else dict(place.axes)
    workers = set(ranks_of(job.wrapped.group))
    parameters = every_parameter(job.wrapped.wrapper)
    inner = sequence_lines(parameters)
    lines = outer | {name: line for name, line in inner.items() if workers.issuperset(line)}
    if not lines:
        return None
    placements = [placements_of(parameter) for parameter in parameters]
    cut = [n for n in outer if n.startswith(_MODEL) or any(p.get(n) is False for p in placements)]
    types = {dtype_name(parameter.computed_in) for parameter in parameters}
    return AxesProbe(
        mesh if outer else None,
        job.channel,
        lines=lines,
        cut=tuple(cut),
        sequences=tuple(inner.keys() & lines.keys()),
        dtype=max(types, key=lambda each: UNIT_ROUNDOFF.get(each, 0.0)),
        device=job.wrapped.device.type,
        spacing=max(job.state_spacing, 1),
        squares=_SquareMeter(parameters, tuple(outer), place.ranks) if outer and place else None,
    )


class _SquareMeter:
    """Sums up the squares of a rank's gradients; over ``axes`` FSDP2 does not average."""

    def __init__(
        self, parameters: Sequence[ManagedParameter], axes: Sequence[str], ranks: Sequence[int]
    ) -> None:
        self._parameters = parameters
        self._run = min(parameters[0].group.ranks)
        self._num_ranks = len(ranks)
        self._rounding = rounding_of([parameter.tensor for parameter in parameters])
        names: dict[str, int] = {}
        self._place: list[int] = []
        self._share: list[float] = []
        for parameter in parameters:
            placements = placements_of(parameter)
            alike = ",".join(axis for axis in axes if placements.get(axis, True))
            self._place.append(names.setdefault(alike, len(names)))
            self._share.append(1 / _copies(parameter, axes))
        self._names = tuple(names)

    @torch.no_grad()
    def read(self) -> "_Reading | None":
        """Begin to read the norms of all gradients; None without gradients."""
        norms: list[torch.Tensor] = []
        mix = np.zeros((len(self._names), len(self._parameters)))
        for place, share, parameter in zip(self._place, self._share, self._parameters, strict=True):
            gradient = parameter.tensor.grad
            if gradient is not None:
                mix[place, len(norms)] = share
                norms.append(torch.linalg.vector_norm(local_of(gradient)).double())
        if not norms:
            return None
        return _Reading(copy_numbers(torch.stack(norms), torch.float64), mix[:, : len(norms)])

    def squares(self, reading: "_Reading") -> Squares:
        """Wait for the device; return the sums with their names."""
        sums_C = reading.mix_CP @ np.square(reading.norms_P.numpy())
        sums = dict(zip(self._names, sums_C.tolist(), strict=True))
        return Squares(self._run, self._num_ranks, sums, self._rounding)


class _Reading(NamedTuple):
    """Norms of gradients ``[P]``, perhaps on the device, and how their squares are added up."""

    norms_P: Numbers
    mix_CP: Floats


def _copies(parameter: ManagedParameter, axes: Sequence[str]) -> int:
    """Return how many ranks of its data-parallel group hold a copy of what this rank holds."""
    tensor = parameter.tensor
    if not isinstance(tensor, DTensor) or not tensor.device_mesh.mesh_dim_names:
        return 1
    sizes = zip(tensor.device_mesh.mesh_dim_names, tensor.device_mesh.shape, strict=True)
    alike = placements_of(parameter)
    return math.prod(size for name, size in sizes if name not in axes and alike[name])
