"""The links between agents of several hosts, here on one."""

import socket
import threading
import time
from dataclasses import replace

import pytest
import zmq

from rankscope.agent import letters
from rankscope.agent.addresses import candidate_addresses, tcp_endpoint
from rankscope.agent.hosts import HostLink, HostsError, Invitation, RootLink

LONG = 60.0  # a busy machine gets there much earlier


@pytest.fixture
def opened():
    """Return a function that closes what it is given when the test ends."""
    links = []
    yield lambda link: links.append(link) or link
    for link in links:
        link.close()


def exchange(root, links, done):
    """Let all links work until ``done`` of what has arrived at the root, and at each host."""
    at_root, at_hosts = [], [[] for _ in links]
    until = time.monotonic() + LONG
    while not done(at_root, at_hosts):
        assert time.monotonic() < until, (at_root, at_hosts)
        for place, link in enumerate(links):
            at_hosts[place] += link.poll(0.0)
        at_root += root.poll(0.01)
    return at_root, at_hosts


def test_frames_reach_the_root_in_order_and_its_answers_the_hosts(opened):
    root = opened(RootLink("127.0.0.1"))
    links = [opened(HostLink(root.invitation, host)) for host in (1, 2, 3)]
    for step in range(50):
        for host, link in enumerate(links, 1):
            assert link.send(b"%d of %d" % (step, host), step=step)
    at_root, _ = exchange(root, links, lambda at_root, _: len(at_root) == 150)
    for host in (1, 2, 3):
        expected = [b"%d of %d" % (step, host) for step in range(50)]
        assert [payload for own, payload in at_root if own == host] == expected
    assert root.hosts == (1, 2, 3)
    for host in root.hosts:
        assert root.send(host, b"to %d" % host)
        assert root.send(host, b"and again")
    _, at_hosts = exchange(root, links, lambda _, at_hosts: all(len(a) == 2 for a in at_hosts))
    assert at_hosts == [[b"to %d" % host, b"and again"] for host in (1, 2, 3)]
    assert all(root.silent_seconds(host) < LONG for host in root.hosts)
    assert root.silent_seconds(9) == float("inf")
    assert not root.send(9, b"nobody")


def test_an_invitation_survives_the_store_and_hides_its_secret():
    invitation = Invitation(("tcp://[::1]:5",), "public", "hidden")
    assert Invitation.decode(invitation.encode()) == invitation
    assert "hidden" not in repr(invitation)


@pytest.mark.parametrize("content", [b"", b"[2]", b"[2, [], 3, 4]", b"\xff", b"7", b"{}", b"[1]"])
def test_another_invitation_is_refused(content):
    with pytest.raises(HostsError, match="expected an invitation"):
        Invitation.decode(content)


def stranger_to(invitation, **keys):
    """Return a socket that says hello to the root as an agent would, with keys of its own."""
    place = zmq.Context.instance().socket(zmq.DEALER)
    place.linger = 0
    for name, value in keys.items():
        setattr(place, name, value)
    place.connect(invitation.endpoints[0])
    return place


@pytest.mark.parametrize("kind", ["no keys", "own keys", "plain socket"])
def test_nobody_without_the_secret_is_heard(opened, kind):
    root = opened(RootLink("127.0.0.1"))
    invitation = root.invitation
    hello = letters.parts_of(letters.Packet(letters.Note.DATA, 0, b"forged"), 5, 1, 0)
    if kind == "plain socket":
        port = int(invitation.endpoints[0].rpartition(":")[2])
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\0" * 200)
    else:
        public, secret = zmq.curve_keypair()
        keys = {"curve_serverkey": invitation.server_public.encode()}
        keys |= {"curve_publickey": public, "curve_secretkey": secret}
        stranger = stranger_to(invitation, **(keys if kind == "own keys" else {}))
        stranger.send_multipart(hello)
    link = opened(HostLink(invitation, 1))
    link.send(b"ours")
    at_root, _ = exchange(root, [link], lambda at_root, _: bool(at_root))
    at_root += root.poll(1.0)
    stranger.close()
    assert at_root == [(1, b"ours")]
    assert root.hosts == (1,)


def test_another_root_is_not_believed(opened):
    root, other = opened(RootLink("127.0.0.1")), opened(RootLink("127.0.0.1"))
    misled = replace(root.invitation, endpoints=other.invitation.endpoints)
    link = opened(HostLink(misled, 1))
    link.send(b"secret")
    for _ in range(50):
        assert other.poll(0.01) == []
        assert link.poll(0.0) == []
    assert other.hosts == ()
    assert link.silent_seconds == float("inf")


def test_the_address_that_answers_is_found_among_those_that_do_not(opened):
    root, other = opened(RootLink("127.0.0.1")), opened(RootLink("127.0.0.1"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = tcp_endpoint("127.0.0.1", closed.getsockname()[1])
        # one that drops everything, one where nobody listens, one where somebody else does
        addresses = (
            "tcp://192.0.2.1:9",
            dead,
            *other.invitation.endpoints,
            *root.invitation.endpoints,
        )
        link = opened(HostLink(replace(root.invitation, endpoints=addresses), 1))
        link.send(b"found")
        at_root, _ = exchange(root, [link], lambda at_root, _: bool(at_root))
    assert at_root == [(1, b"found")]


@pytest.mark.skipif(not socket.has_ipv6, reason="Python without IPv6")
def test_ipv6(opened):
    try:
        root = opened(RootLink("::1"))
    except HostsError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    link = opened(HostLink(root.invitation, 1))
    link.send(b"six")
    assert exchange(root, [link], lambda at_root, _: bool(at_root))[0] == [(1, b"six")]
    assert root.endpoint.startswith("tcp://[::1]:")


def test_an_address_that_is_taken_is_said():
    root = RootLink("127.0.0.1")
    port = int(root.endpoint.rpartition(":")[2])
    with pytest.raises(HostsError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        RootLink("127.0.0.1", port)
    root.close()
    root.close()


def test_nothing_blocks_without_a_root_and_the_link_says_what_it_could_not_deliver(opened):
    root = RootLink("127.0.0.1")
    invitation = root.invitation
    root.close()
    link = opened(HostLink(invitation, 1, kept_bytes=10_000))
    taken = [link.send(b"x" * 1000, step=step) for step in range(20)]
    assert taken.count(True) == 9
    assert not taken[-1]
    assert link.poll(0.0) == []
    assert link.backlog_bytes >= 9000
    assert not link.close(0.1)


def test_a_link_that_closes_delivers_first(opened):
    root = opened(RootLink("127.0.0.1"))
    arrived, stop = [], threading.Event()

    def serve():
        while not stop.is_set():
            arrived.extend(root.poll(0.05))

    thread = threading.Thread(target=serve)
    thread.start()
    link = HostLink(root.invitation, 1, kept_bytes=20_000)
    taken = [link.send(b"%d" % step + b"x" * 1000, step=step) for step in range(30)]
    delivered = link.close(LONG)
    stop.set()
    thread.join()
    assert delivered
    assert len(arrived) == taken.count(True)
    assert root.missing(1) == [(taken.count(True), 29)]


def test_the_root_hears_of_its_last_frames_before_a_link_closes(opened):
    root = opened(RootLink("127.0.0.1"))
    link = opened(HostLink(root.invitation, 1))
    exchange(root, [link], lambda *_: bool(root.hosts))
    assert root.send(1, b"the last word")
    exchange(root, [link], lambda _, at_hosts: bool(at_hosts[0]))
    assert link.close(LONG)
    assert root.flush(LONG)


def test_an_agent_that_was_started_again_takes_its_predecessors_place(opened):
    root = opened(RootLink("127.0.0.1"))
    first = opened(HostLink(root.invitation, 1))
    first.send(b"first")
    exchange(root, [first], lambda at_root, _: bool(at_root))
    second = opened(HostLink(root.invitation, 1))
    second.send(b"second")
    at_root, _ = exchange(root, [first, second], lambda at_root, _: bool(at_root))
    assert at_root == [(1, b"second")]
    first.send(b"too late")
    root.send(1, b"for the second")
    _, at_hosts = exchange(root, [first, second], lambda _, at_hosts: bool(at_hosts[1]))
    assert at_hosts == [[], [b"for the second"]]
    assert root.poll(0.2) == []


def test_a_connection_that_breaks_costs_nothing(opened):
    """A relay between the two drops its connections, with what they hold, again and again."""
    root = opened(RootLink("127.0.0.1"))
    with Relay(int(root.endpoint.rpartition(":")[2])) as relay:
        endpoints = (tcp_endpoint("127.0.0.1", relay.port),)
        link = opened(HostLink(replace(root.invitation, endpoints=endpoints), 1))
        sent, at_root, at_host = [], [], []
        until = time.monotonic() + LONG
        for step in range(600):
            sent.append(b"%d " % step + b"x" * 20_000)
            assert link.send(sent[-1], step=step)
            at_host += link.poll(0.0)
            at_root += root.poll(0.001)
            if step in (100, 101, 250, 400):
                relay.drop()
            if root.hosts:
                root.send(1, b"%d" % step)
        while len(at_root) < len(sent) or not at_host or at_host[-1] != b"599":
            assert time.monotonic() < until, (len(at_root), at_host[-1:])
            at_host += link.poll(0.0)
            at_root += root.poll(0.01)
        assert relay.num_dropped >= 3
    assert [payload for _, payload in at_root] == sent
    numbers = [int(payload) for payload in at_host]
    assert numbers == list(range(numbers[0], 600))
    assert root.missing(1) == []


class Relay:
    """Passes TCP connections on to a port, until it drops them."""

    def __init__(self, target):
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._pairs = []
        self.num_dropped = 0

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
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


def test_addresses_begin_with_the_one_by_which_the_store_is_reached():
    assert candidate_addresses("127.0.0.1")[-1] == "127.0.0.1"
    found = candidate_addresses("localhost")
    assert len(set(found)) == len(found)
    own = [address for address in found if not address.startswith(("127.", "::1"))]
    for address in own:
        assert candidate_addresses(address)[0] == address
    assert candidate_addresses("no such host, really") == candidate_addresses(None)
