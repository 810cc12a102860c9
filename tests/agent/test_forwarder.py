"""The agent of another host and the root's view of it, over a link that breaks."""

import time
from dataclasses import replace

import pytest

from rankscope.agent.forwarder import Forwarder
from rankscope.agent.frames import ALL_RANKS, Frame, FrameKind, FrameReader, pack
from rankscope.agent.hosts import Invitation
from rankscope.agent.ranks import RankProcesses
from rankscope.agent.remote_hosts import RemoteHosts
from rankscope.bus.messages import Layout
from support.relay import Relay

RANKS = (2, 3)


class Host:
    """The agent of a host with ranks 2 and 3, beside the root, which reaches it through a relay.

    Attributes:
        at_root: Kind, rank and step of the frames that have arrived there.
        at_ranks: The same of those that have come back.
    """

    def __init__(self):
        self.remote = RemoteHosts("127.0.0.1", None)
        invitation = Invitation.decode(self.remote.invitation)
        (endpoint,) = invitation.endpoints
        address, _, port = endpoint.rpartition(":")
        self.relay = Relay(int(port))
        self._invitation = replace(invitation, endpoints=(f"{address}:{self.relay.port}",))
        setup = {"host": 2, "num_local": 2, "layout": Layout(num_workers=4).to_json()}
        self.forwarder = Forwarder(setup, self._back, RankProcesses())
        self.at_root, self.at_ranks = [], []

    def __enter__(self):
        self.relay.__enter__()
        return self

    def __exit__(self, *_):
        for rank in RANKS:  # nothing is wanted any more
            self.remote.send(rank, pack(FrameKind.DONE, rank=rank))
        limit = time.monotonic() + 60.0
        while not self.forwarder.finished:
            assert time.monotonic() < limit
            self.remote.poll()
            self.forwarder.work()
        self.relay.__exit__()
        self.remote.close(0.0)

    def take(self, kind, rank, step=-1, payload=b"{}"):
        self.forwarder.take(rank, Frame(kind, rank, step, payload), time.time())

    def invite(self):
        self.take(FrameKind.INVITATION, RANKS[0], payload=self._invitation.encode())

    def until(self, done):
        """Let both work until ``done`` of what has arrived; then forget that."""
        limit = time.monotonic() + 60.0
        while not done():
            assert time.monotonic() < limit, (self.at_root, self.at_ranks)
            self.forwarder.work()
            self.at_root += [frame[:3] for _, frame, _ in self.remote.poll()]
            time.sleep(0.005)
        self.at_root.clear()

    def _back(self, rank, content):
        self.at_ranks += [frame[:3] for frame in FrameReader().feed(content)]


@pytest.fixture
def host():
    with Host() as one:
        yield one


def test_after_a_break_the_root_knows_who_is_there_and_who_has_left(host):
    host.invite()
    for rank in RANKS:
        host.take(FrameKind.HELLO, rank)
    host.take(FrameKind.SUBSCRIBE, 2)
    host.take(FrameKind.BYE, 3)
    host.forwarder.take(3, None, time.time())
    lasting = [(FrameKind.HELLO, 2, -1), (FrameKind.HELLO, 3, -1), (FrameKind.SUBSCRIBE, 2, -1)]
    lasting += [(FrameKind.BYE, 3, -1), (FrameKind.GONE, 3, -1)]
    host.until(lambda: host.at_root == lasting)
    host.relay.drop()
    host.take(FrameKind.STEP, 2, 7)
    host.until(lambda: set(lasting) <= set(host.at_root))
    host.remote.send(ALL_RANKS, pack(FrameKind.INTERVAL, b"4", step=40))
    host.until(lambda: (FrameKind.INTERVAL, ALL_RANKS, 40) in host.at_ranks)
