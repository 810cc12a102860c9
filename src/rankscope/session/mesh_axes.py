"""Replicas over a mesh's other axes, as one rank sends them to the root that compares them.

Each data-parallel group has a run and a root of its own. One of them compares: that of the mesh's
first rank. Its own ranks send by the link that they have. A rank of another run opens a second one,
to the agent that this run has on its host; where it has none, that rank's replicas are not
compared.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from rankscope.agent import launch
from rankscope.agent.frames import GUESTS, Kind, pack
from rankscope.agent.link import Link
from rankscope.capture.state.replicas import PendingPart, ReplicaMeter
from rankscope.capture.taps.fsdp2_mesh import MeshPlace
from rankscope.errors import RankscopeError
from rankscope.session.rendezvous import LateError, Rendezvous
from rankscope.session.wrapping import Wrapped

_log = logging.getLogger("rankscope")

PATIENCE_SECONDS = 30.0
"""How long a rank waits for the mesh's other runs, whose ranks begin at about the same time."""

_MOST_PENDING = 4  # steps that wait for their device

Send = Callable[[int, bytes], None]
"""Sends a packed part of a step, given its number."""


class LiveReplicas:
    """Reads and sends what one rank replicates; all calls come on the training thread.

    Whatever fails here ends the comparison over other axes, and nothing else.

    Args:
        place: This rank's place in the mesh.
        spacing: Steps from turn to turn, once a run has begun.
        guest: The way to the root, of a rank of another run; None: the run's own is taken.
        send: Sends by the run's own link.
    """

    def __init__(self, place: MeshPlace, guest: Link | None, send: Send, *, spacing: int) -> None:
        self._meter: ReplicaMeter | None = None
        self._rank, self._guest, self._send = place.rank, guest, send
        self._pending: deque[tuple[int, PendingPart]] = deque()
        try:
            self._meter = ReplicaMeter(place, spacing=spacing)
        except Exception as error:  # whatever the model is made of
            self._end(error)

    def begin_step(self, step: int) -> None:
        """Read parameters at the first forward pass of a step."""
        self._try(lambda meter: meter.begin_step(step))

    def see_applied(self) -> None:
        """Read gradients when ``optimizer.step`` is about to run."""
        self._try(ReplicaMeter.see_applied)

    def end_step(self, step: int) -> None:
        """Send what was read, as soon as it is on the host."""
        self._try(partial(self._end_step, step))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._try(ReplicaMeter.abort)

    def close(self) -> None:
        """Send what waits, and close a guest's link."""
        self._try(lambda _: self._hand_over(0))
        if self._guest is not None:
            self._guest.close()

    def _end_step(self, step: int, meter: ReplicaMeter) -> None:
        part = meter.collect()
        if part is not None:
            self._pending.append((step, part))
        self._hand_over(_MOST_PENDING)

    def _hand_over(self, most: int) -> None:
        while self._pending and (self._pending[0][1].ready or len(self._pending) > most):
            step, part = self._pending.popleft()
            content = part.read().pack()
            if self._guest is None:
                self._send(step, content)
            elif self._guest.has_room:
                self._guest.send(Kind.MESH, content, rank=GUESTS + self._rank, step=step)
                self._guest.poll()

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


@dataclass(frozen=True, slots=True)
class MeshMeeting:
    """What the ranks of a mesh have told each other as they began.

    Attributes:
        place: This rank's place in it.
        ranks: Where they can agree on something.
        own: The first rank of this run.
        answer: What the mesh's first rank has said: its run, where its root is reached on each
            host, and its secret.
    """

    place: MeshPlace
    ranks: Rendezvous
    own: int
    answer: Mapping[str, Any]


def meet_mesh(
    wrapped: Wrapped, group: dist.ProcessGroup, *, host: str, address: str, secret: str
) -> MeshMeeting | None:
    """Meet all ranks of a mesh; None without one, or where some do not come.

    All of them call it at the same point.

    Args:
        wrapped: The model.
        group: The ranks of this run.
        host: This rank's host.
        address: Where the agent of this rank's run is reached on it.
        secret: What that agent asks for.
    """
    place, world = wrapped.mesh, dist.group.WORLD
    if place is None or world is None:
        return None
    own = dist.get_process_group_ranks(group)[0]
    said = {"run": own, "host": host, "address": address, "secret": secret}
    ranks = Rendezvous(world, place.ranks, patience_seconds=PATIENCE_SECONDS)
    try:
        return MeshMeeting(place, ranks, own, _meet(ranks, said))
    except LateError as error:
        _log.info("replicas over other axes of the mesh are not compared: %s", error)
        return None


def join_mesh(
    meeting: MeshMeeting, *, host: str, spacing: int
) -> Callable[[Send], LiveReplicas] | None:
    """Return what makes a rank's replicas known to the root that compares them; None without.

    Args:
        meeting: Of all ranks of the mesh.
        host: This rank's host.
        spacing: Steps from turn to turn.
    """
    place, answer, guest = meeting.place, meeting.answer, None
    if answer["run"] != meeting.own:
        found = answer["hosts"].get(host)
        if found is None:
            _log.info("replicas of this host's ranks over other axes of the mesh are not compared")
            return None
        number = GUESTS + place.rank
        hello = {"rank": number, "secret": answer["secret"]}
        frame = pack(Kind.HELLO, json.dumps(hello).encode(), rank=number)
        guest = Link(partial(launch.connect, found), frame)
    return partial(LiveReplicas, place, guest, spacing=spacing)


def _meet(meeting: Rendezvous, said: dict[str, Any]) -> dict[str, Any]:
    """Return where the root of the mesh's first rank is reached on each host, and its secret.

    Raises:
        LateError: Some rank does not come.
    """
    heard = meeting.gather(json.dumps(said).encode())
    if heard is not None:
        each = [json.loads(one) for one in heard]
        hosts = {one["host"]: one["address"] for one in each if one["run"] == said["run"]}
        answer = {"run": said["run"], "hosts": hosts, "secret": said["secret"]}
        meeting.write("answer", json.dumps(answer).encode())
        return answer
    found: dict[str, Any] = json.loads(meeting.read("answer")[0])
    return found
