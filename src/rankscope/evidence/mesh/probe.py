"""Reads one rank's replicas over a mesh's other axes, and sends them to the root."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rankscope.bus.probe import Channel, Job, Probe, StepEnd
from rankscope.errors import RankscopeError
from rankscope.evidence.mesh.meter import PendingPart, ReplicaMeter

_log = logging.getLogger("rankscope")

NAME = "mesh"

_MOST_PENDING = 4  # steps that wait for their device


class _Replicas:
    """Reads and sends one rank's replicas; all calls come on the training thread.

    A failure here only ends the comparison over other axes.

    Args:
        mesh: The mesh, with the link to the root that compares it.
        channel: The link to this run's root.
        spacing: Steps from slot to slot, once a run has begun.
    """

    def __init__(self, mesh: Any, channel: Channel, *, spacing: int) -> None:
        self._meter: ReplicaMeter | None = None
        self._mesh = mesh
        self._channel = channel
        self._pending: deque[tuple[int, PendingPart]] = deque()
        try:
            self._meter = ReplicaMeter(mesh.place, spacing=spacing)
        except Exception as error:  # a model of an unknown kind
            self._end(error)

    def begin_step(self, step: int) -> None:
        """Read parameters at the first forward pass of a step."""
        self._try(lambda meter: meter.begin_step(step))

    def before_update(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run."""
        self._try(ReplicaMeter.see_applied)

    def collect(self, end: StepEnd) -> None:
        """Send the readings, as soon as they are on the host."""
        if not end.comparable:
            self.abort()
        self._try(partial(self._end_step, end.step))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._try(ReplicaMeter.abort)

    def close(self) -> None:
        """Send the rest, and close a guest's link."""
        self._try(lambda _: self._hand_over(0))
        self._mesh.close()

    def _end_step(self, step: int, meter: ReplicaMeter) -> None:
        part = meter.collect()
        if part is not None:
            self._pending.append((step, part))
        self._hand_over(_MOST_PENDING)

    def _hand_over(self, most: int) -> None:
        while self._pending and (self._pending[0][1].ready or len(self._pending) > most):
            step, part = self._pending.popleft()
            content = part.read().pack()
            if self._mesh.is_guest:
                self._mesh.send(NAME, step, content)
            elif self._channel.has_room():
                self._channel.send(NAME, step, content)

    def _try(self, work: Callable[[ReplicaMeter], object]) -> None:
        if self._meter is None:
            return
        try:
            work(self._meter)
        except Exception as error:  # the root may have ended before this rank
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._meter = None
        level = logging.DEBUG if isinstance(error, RankscopeError) else logging.WARNING
        _log.log(
            level,
            "replicas over other axes of the mesh are not compared (%s: %s)",
            type(error).__name__,
            error,
        )


class MeshProbe(Probe):
    """Reads one rank's replicas over other axes, and the weights that pipeline stages share."""

    def __init__(self, replicas: Sequence[_Replicas]) -> None:
        self._replicas = replicas

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Read parameters at the first forward pass of a step."""
        for each in self._replicas:
            each.begin_step(step)

    def before_update(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run."""
        for each in self._replicas:
            each.before_update()

    def collect(self, end: StepEnd) -> None:
        """Send the readings, as soon as they are on the host."""
        for each in self._replicas:
            each.collect(end)

    def abort(self) -> None:
        """Forget a step that was never finished."""
        for each in self._replicas:
            each.abort()

    def close(self) -> None:
        """Send the rest, and close a guest's links."""
        for each in self._replicas:
            each.close()


def make_probe(job: Job) -> MeshProbe | None:
    """Return the probe of replicas over other axes, and over stages; None without such axes."""
    channel = job.channel
    meshes = [one for one in (channel.mesh, channel.stages) if one is not None and one.reaches]
    replicas = [_Replicas(mesh, channel, spacing=job.state_spacing) for mesh in meshes]
    return MeshProbe(replicas) if replicas else None
