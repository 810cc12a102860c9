"""The meeting of all ranks of a mesh, each of whose data-parallel groups records a run of its own.

One root compares the mesh's replicated state: that of the run of its first rank. Ranks of this run
use their own link. A rank of another run is a guest: it opens a second link, to this run's agent on
its host; without such an agent, that rank is not compared.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from rankscope.agent import launch
from rankscope.agent.frames import GUESTS, FrameKind, pack
from rankscope.agent.link import Link
from rankscope.agent.message import tag
from rankscope.bus.probe import Content
from rankscope.wrappers.find import Wrapped
from rankscope.wrappers.fsdp2_mesh import MeshPlace
from rankscope.wrappers.rendezvous import LateError, Rendezvous

_log = logging.getLogger("rankscope")

PATIENCE_SECONDS = 30.0
"""Seconds that a rank waits for the mesh's other runs, which begin at about the same time."""


@dataclass(frozen=True, slots=True)
class MeshMeeting:
    """The facts that the ranks of a mesh exchange as they begin.

    Attributes:
        place: This rank's place in it.
        ranks: The rendezvous of all ranks of the mesh.
        own: The first rank of this run.
        answer: From the mesh's first rank: its run, the agent's address on each host, its secret.
    """

    place: MeshPlace
    ranks: Rendezvous
    own: int
    answer: Mapping[str, Any]


class JoinedMesh:
    """One rank's connection to the root that compares the mesh's replicated state.

    Args:
        place: This rank's place in the mesh.
        ranks: The rendezvous of all ranks of the mesh.
        guest: The link of a rank of another run; None: the run's own link is used.
        reaches: Whether there is a connection.
    """

    def __init__(
        self,
        place: MeshPlace,
        ranks: Rendezvous,
        guest: Link | None = None,
        *,
        reaches: bool = True,
    ) -> None:
        self.place = place
        self.ranks = ranks
        self.reaches = reaches
        self._guest = guest

    @property
    def is_guest(self) -> bool:
        """Whether this rank sends to another run's root."""
        return self._guest is not None

    def send(self, name: str, step: int, content: Content) -> None:
        """Send a guest's evidence of a step, if there is room."""
        guest = self._guest
        if guest is not None and guest.has_room:
            payload = tag(name, content)
            guest.send(FrameKind.EVIDENCE, payload, rank=GUESTS + self.place.rank, step=step)
            guest.poll()

    def close(self) -> None:
        """Close a guest's link."""
        if self._guest is not None:
            self._guest.close()


def meet_mesh(
    wrapped: Wrapped, group: dist.ProcessGroup, *, host: str, address: str, secret: str
) -> MeshMeeting | None:
    """Meet all ranks of a mesh, which all call it at the same point.

    None without a mesh, or if some ranks do not come. ``address`` and ``secret`` are those of this
    run's agent on ``host``.
    """
    place = wrapped.mesh
    world = dist.group.WORLD
    if place is None or world is None:
        return None
    own = dist.get_process_group_ranks(group)[0]
    facts = {"run": own, "host": host, "address": address, "secret": secret}
    ranks = Rendezvous(world, place.ranks, patience_seconds=PATIENCE_SECONDS)
    try:
        return MeshMeeting(place, ranks, own, _meet(ranks, facts))
    except LateError as error:
        _log.info("replicas over other axes of the mesh are not compared: %s", error)
        return None


def join_mesh(meeting: MeshMeeting, *, host: str, compares: bool) -> JoinedMesh:
    """Return a rank's connection to the root that compares the mesh's replicated state."""
    answer = meeting.answer
    if answer["run"] == meeting.own or not compares:
        return JoinedMesh(meeting.place, meeting.ranks, reaches=compares)
    found = answer["hosts"].get(host)
    if found is None:
        _log.info("replicas of this host's ranks over other axes of the mesh are not compared")
        return JoinedMesh(meeting.place, meeting.ranks, reaches=False)
    number = GUESTS + meeting.place.rank
    hello = {"rank": number, "secret": answer["secret"]}
    frame = pack(FrameKind.HELLO, json.dumps(hello).encode(), rank=number)
    guest = Link(partial(launch.connect, found), frame)
    return JoinedMesh(meeting.place, meeting.ranks, guest)


def _meet(meeting: Rendezvous, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the address of the agents of the mesh's first run on each host, and its secret.

    Raises:
        LateError: Some rank does not come.
    """
    gathered = meeting.gather(json.dumps(facts).encode())
    if gathered is not None:
        answer = hosts_of([json.loads(one) for one in gathered], facts)
        meeting.write("answer", json.dumps(answer).encode())
        return answer
    found: dict[str, Any] = json.loads(meeting.read("answer")[0])
    return found


def hosts_of(each: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run of ``facts``, the agent's address on each of its hosts, and its secret."""
    hosts = {one["host"]: one["address"] for one in each if one["run"] == facts["run"]}
    return {"run": facts["run"], "hosts": hosts, "secret": facts["secret"]}
