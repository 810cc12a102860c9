"""The links between agents of several hosts, here on one."""

import socket
import threading
import time
from dataclasses import replace

import pytest
import zmq

from rankscope.agent.hosts import HOST, HostLink, RootLink, tcp_endpoint
from support.accidents import wait_until

LONG = 60.0  # a busy machine gets there much earlier


@pytest.fixture
def opened():
    """Return a function that closes what it is given when the test ends."""
    links = []
    yield lambda link: links.append(link) or link
    for link in links:
        link.close()


def linked(invitation, host, **options):
    """Return another host's end of a link, which searches for the root."""
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
