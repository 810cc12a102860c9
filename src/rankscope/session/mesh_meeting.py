"""The meeting of all ranks of a mesh, each of whose data-parallel groups records a run of its own.

One root compares what the mesh replicates: that of its first rank's run. Its own ranks send by the
link that they have. A rank of another run is a guest: it opens a second link, to the agent that
this run has on its host; where it has none, that rank is not compared.
"""

import json
import logging
from collections.abc import Mapping
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
"""How long a rank waits for the mesh's other runs, whose ranks begin at about the same time."""


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


class JoinedMesh:
    """One rank's way to the root that compares what a mesh replicates.

    Args:
        place: This rank's place in the mesh.
        ranks: Where its ranks agree.
        guest: The link of a rank of another run; None: the run's own is taken.
        reaches: Whether there is a way.
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
        """Send what a kind of evidence knows of a step, if there is room; as a guest."""
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
    """Meet all ranks of a mesh; None without one, or where some do not come.

    All of them call it at the same point.

    Args:
        wrapped: The model.
        group: The ranks of this run.
        host: This rank's host.
        address: Where the agent of this rank's run is reached on it.
        secret: What that agent asks for.
    """
    place = wrapped.mesh
    world = dist.group.WORLD
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


def join_mesh(meeting: MeshMeeting, *, host: str, compares: bool) -> JoinedMesh:
    """Return a rank's way to the root that compares the mesh.

    Args:
        meeting: Of all ranks of the mesh.
        host: This rank's host.
        compares: Whether what the mesh replicates is to be compared.
    """
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
