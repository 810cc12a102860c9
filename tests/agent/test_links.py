import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
import zmq

from rankscope.agent import link as link_module
from rankscope.agent import server
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.hosts import HOST, HostLink, RootLink, tcp_endpoint
from rankscope.agent.link import Link, LinkError, connect, listen
from rankscope.agent.rank_processes import ProgressMark
from rankscope.agent.server import LocalServer
from support.accidents import wait_until

# The two ends of a rank's socket ----------------------------------------------------------------

SECRET = "password"


def check(frame):
    try:
        said = json.loads(frame.payload)
        return said["rank"] if said["secret"] == SECRET else None
    except (ValueError, KeyError, TypeError):
        return None


class Agent:
    """The reading half of an agent; it begins to read with ``start``."""

    def __init__(self):
        listening, self.address = listen()
        self.arrived, self.links = [], []
        self.server = LocalServer(
            listening, check, introduce=lambda *_: None, lives=lambda rank: True
        )

    def steps(self):
        self.arrived += self.server.take(0.05)
        return [each.frame.step for each in self.arrived if each.frame and each.frame.step >= 0]


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    for link in agent.links:
        link.close()
    if not agent.server._thread.ident:
        agent.server.start()
    agent.server.close(1.0)


def link_to(agent, rank=0):
    hello = pack(FrameKind.HELLO, json.dumps({"rank": rank, "secret": SECRET}).encode(), rank=rank)
    link = Link(lambda: connect(agent.address), hello)
    agent.links.append(link)
    return link


def send(link, *steps, size=1000):
    for step in steps:
        link.send(FrameKind.STEP, bytes(size), rank=0, step=step)


# The probe's end --------------------------------------------------------------------------------


def test_what_a_script_opens_in_place_of_the_connection_is_left_alone(agent):
    """A script may close all files that it does not know."""
    link = link_to(agent)
    mark = ProgressMark()
    numbers = link._socket.fileno(), mark.fileno()
    for number in numbers:
        os.close(number)
    opened = [os.open(os.devnull, os.O_RDWR) for _ in numbers]
    assert set(opened) == set(numbers)
    with pytest.raises(LinkError, match="closed in this process"):
        send(link, 0)
    link.close()
    mark.close()
    for number in opened:
        os.close(number)  # they are still ours


def test_a_broken_connection_is_no_signal(agent):
    """A script may have it end its process; and what the agent said before is heard first."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        link = link_to(agent)
        agent.server.start()
        wait_until(lambda: agent.server.ranks == (0,))
        agent.server.send(0, pack(FrameKind.OFF, b"why", rank=0))
        agent.server.close(5.0)
        send(link, 0, 1)
        assert not link.drain(5.0)
        assert [frame.payload for frame in link.poll()] == [b"why"]
        with pytest.raises(LinkError, match="has ended"):
            send(link, 2)
    finally:
        signal.signal(signal.SIGPIPE, before)


# The agent's end --------------------------------------------------------------------------------


def test_what_was_sent_before_a_connection_anew_is_read_first(agent):
    """As after Ctrl-C in the middle of a call of the system, while the agent is busy."""
    link = link_to(agent)
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    send(link, *range(60), size=100_000)  # more than is read at once, where the system has room
    link._connection = link_module._Connection.IN_CALL
    send(link, *range(60, 64), size=100_000)
    agent.server.start()
    while not link.drain(0.0):
        agent.steps()
    wait_until(lambda: set(agent.steps()) == set(range(64)))
    assert all(each.frame is not None for each in agent.arrived)


def test_who_does_not_know_the_secret_is_turned_away(agent, monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.1)
    agent.server.start()
    wrong = json.dumps({"rank": 0, "secret": "guessed"}).encode()
    said = [
        b"GET / HTTP/1.1\r\n\r\n",
        pack(FrameKind.HELLO, wrong, rank=0),
        pack(FrameKind.STEP, b"", rank=0, step=7),
        pack(FrameKind.HELLO, b"[]", rank=0),
        b"",
    ]
    for words in said:
        stranger = connect(agent.address)
        stranger.sendall(words)
        stranger.settimeout(10.0)
        assert stranger.recv(1) == b""  # closed from the other side
        stranger.close()
    link = link_to(agent)
    send(link, 0)
    wait_until(lambda: agent.steps() == [0])
    assert agent.server.ranks == (0,)


def test_a_busy_agent_holds_no_more_than_it_may(agent, monkeypatch):
    """What it does not take stays with the ranks, which leave gradients out then."""
    monkeypatch.setattr(server, "MOST_HELD_BYTES", 1 << 20)
    agent.server.start()
    link = link_to(agent)
    send(link, *range(250), size=100_000)
    assert not link.drain(0.5)
    assert agent.server._held < 3 << 20
    assert not link.has_room
    while not link.drain(0.0):
        agent.steps()
    wait_until(lambda: agent.steps() == list(range(250)))


# Between hosts ----------------------------------------------------------------------------------

LONG = 60.0  # a busy machine gets there much earlier


@pytest.fixture
def opened():
    links = []
    yield lambda link: links.append(link) or link
    for link in links:
        link.close()


def linked(invitation, host, **options):
    link = HostLink(host, **options)
    link.open(invitation.encode())
    return link


def exchange(root, links, done):
    """Let all links work until ``done`` of what has arrived at the root, and at each host."""
    at_root, at_hosts = [], [[] for _ in links]
    until = time.monotonic() + LONG
    while not done(at_root, at_hosts):
        assert time.monotonic() < until, (at_root, at_hosts)
        for place, link in enumerate(links):
            at_hosts[place] += link.poll()
        at_root += root.poll()
        time.sleep(0.005)
    return at_root, at_hosts


@pytest.mark.parametrize("kind", ["no keys", "own keys", "plain socket"])
def test_nobody_without_the_secret_is_heard(opened, kind):
    root = opened(RootLink("127.0.0.1"))
    invitation = root.invitation
    if kind == "plain socket":
        port = int(invitation.endpoints[0].rpartition(":")[2])
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\0" * 200)
    else:
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.linger = 0
        if kind == "own keys":
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = invitation.server_public.encode()
        stranger.connect(invitation.endpoints[0])
        stranger.send_multipart([HOST.pack(5), b"forged"])
    link = opened(linked(invitation, 1))
    link.send(b"ours")
    at_root, _ = exchange(root, [link], lambda at_root, _: bool(at_root))
    time.sleep(1.0)
    at_root += root.poll()
    stranger.close()
    assert at_root == [(1, b"ours")]
    assert root.hosts == (1,)


def test_a_link_that_closes_delivers_first(opened):
    root = opened(RootLink("127.0.0.1"))
    arrived, stop = [], threading.Event()

    def serve():
        while not stop.is_set():
            arrived.extend(root.poll())
            time.sleep(0.005)

    thread = threading.Thread(target=serve)
    thread.start()
    link = linked(root.invitation, 1)
    sent = [b"%d" % step + b"x" * 1000 for step in range(1000)]  # more than ZeroMQ's queue
    assert all(map(link.send, sent))
    assert link.close(LONG)
    wait_until(lambda: len(arrived) == len(sent))
    stop.set()
    thread.join()
    assert [payload for _, payload in arrived] == sent


class Relay:
    """Passes TCP connections on to a port, until it drops them."""

    def __init__(self, target):
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._pairs = []
        self.num_dropped = 0

    def __enter__(self):
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        self.drop()

    def drop(self):
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            self.num_dropped += 1
            for end in pair:
                end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self):
        while True:
            try:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._pairs.append((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source, sink):
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass


def test_a_connection_that_breaks_comes_back_and_both_ends_go_on(opened):
    """A relay between the two drops its connections, with what they hold, again and again."""
    root = opened(RootLink("127.0.0.1"))
    with Relay(int(root.invitation.endpoints[0].rpartition(":")[2])) as relay:
        endpoints = (tcp_endpoint("127.0.0.1", relay.port),)
        link = opened(linked(replace(root.invitation, endpoints=endpoints), 1))
        steps, answers = [], []
        until = time.monotonic() + LONG
        step = 0
        while step < 600 or steps[-1] < 599 or answers.count(b"again") < 3:
            assert time.monotonic() < until, (steps[-1:], answers[-1:])
            if step < 600:
                assert link.send(b"%d " % step + b"x" * 20_000)
                step += 1
            if step in (100, 250, 400):
                relay.drop()
            answers += link.poll()
            steps += [int(payload.split()[0]) for _, payload in root.poll()]
            for host in root.take_behind():
                root.send(host, b"again")
            time.sleep(0.002)
        assert relay.num_dropped >= 3
    assert steps == sorted(set(steps))  # once and in order, but for what was under way
    assert len(steps) > 300
