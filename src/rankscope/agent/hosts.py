"""The links between the agents of several hosts: keys, addresses, and both ends.

The root binds a socket and writes an :class:`Invitation`, which reaches the other agents through
the training's own store. It holds the root's addresses and a secret: only agents with the secret
can connect to the root, and only the root can answer (CURVE, in both directions).

TCP delivers bytes once and in order, also after seconds without traffic. ZeroMQ has a queue for
each connection, reads and writes in a thread of its own, and reopens a broken connection; frames
under way are then lost. The root counts incomplete steps. A host that may have missed a frame
sends the hello frames of its ranks again, and the root answers with the present state.
"""

import contextlib
import fcntl
import ipaddress
import json
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import zmq
from zmq.utils import z85

from rankscope.agent.frames import ALL_RANKS, FrameKind, FrameReader, pack
from rankscope.agent.hang_report import CodePlace, ProcessState, Stack
from rankscope.agent.server import Arrived
from rankscope.errors import RankscopeError

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"  # the scope of an IPv6 address that is not bound to one network


def candidate_addresses(master: str | None = None) -> tuple[str, ...]:
    """Return this host's addresses, the most promising first.

    First comes ``master``, the address of the training's store (usually ``MASTER_ADDR``), if it
    belongs to this host; else the address from which this host reaches the store. Then come the
    addresses of all network interfaces, and last loopback: two "hosts" may be containers that
    share a network. IPv4 and IPv6, without repeats.
    """
    found = [] if master is None else _towards(master)
    found += [*_ipv4_of_interfaces(), *_ipv6_of_interfaces()]
    found.sort(key=lambda address: ipaddress.ip_address(address).is_loopback)
    return tuple(dict.fromkeys(found))


def tcp_endpoint(address: str, port: int) -> str:
    """Return the endpoint for a socket to connect to.

    Example:
        >>> tcp_endpoint("fd00::1", 5555)
        'tcp://[fd00::1]:5555'
    """
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _towards(master: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    own: list[str] = []
    routes: list[str] = []
    for family, kind, _, _, place in infos:
        address = str(place[0])
        if "%" in address or family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            route = str(probe.getsockname()[0])
            (own if route == address else routes).append(route)
    return [*own, *routes]


def _ipv4_of_interfaces() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _ipv6_of_interfaces() -> list[str]:
    found = []
    with contextlib.suppress(OSError):  # no IPv6, or not Linux
        for line in _IF_INET6.read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL:
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


VERSION = 3

HOST = struct.Struct("<I")
"""The first part of a host's message: its number. A frame follows, empty in a beat, which has a
third part."""

BEAT = struct.Struct("<Q")
"""The number of a beat. A host sends one each second, and the root sends it back."""

GOODBYE = b""  # instead of the number of a beat: the host's agent ends
MOST_AT_ONCE = 1000  # most frames that one call returns

OPTIONS = {
    zmq.IPV6: 1,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.SNDBUF: 1 << 20,  # a larger buffer would lose more with a connection
    zmq.MAXMSGSIZE: 1 << 30,
    zmq.HEARTBEAT_IVL: 5000,  # a connection on which nothing comes for so long ...
    zmq.HEARTBEAT_TIMEOUT: 30000,  # ... and this is closed, and opened again
    zmq.HEARTBEAT_TTL: 35000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.CONNECT_TIMEOUT: 2000,
    zmq.HANDSHAKE_IVL: 5000,
}


class HostsError(RankscopeError):
    """The agents of several hosts cannot be linked."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Addresses and keys to reach the root; its secret is for the job's ranks alone."""

    endpoints: tuple[str, ...]  # where the root may be reached, the most promising first
    server_public: str  # the root's public key
    client_secret: str = field(repr=False)  # the secret key of all other agents

    def encode(self) -> bytes:
        """Return the bytes for the training's store."""
        return json.dumps(
            [VERSION, self.endpoints, self.server_public, self.client_secret]
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Invitation":
        """Return the invitation that :meth:`encode` has packed."""
        try:
            version, endpoints, public, secret = json.loads(content)
        except (ValueError, TypeError):
            version = None
        if version != VERSION:
            raise HostsError(
                f"expected an invitation of version {VERSION}, got {content[:4]!r}…: two versions "
                "of rankscope are at work; install the same one for all ranks"
            )
        return cls(tuple(endpoints), public, secret)


@dataclass(slots=True)
class _Peer:
    route: bytes  # of its connection; each connection has another one
    received_at: float


class RootLink:
    """The root's end of the links to other hosts; ``master``: where the training's store is."""

    def __init__(self, address: str | None = None, *, master: str | None = None) -> None:
        self._peers: dict[int, _Peer] = {}
        self._behind: set[int] = set()
        self._left: set[int] = set()
        public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._client_key = client_public
        self._context = zmq.Context(io_threads=1)
        self._gate = self._context.socket(zmq.REP)  # accepts or rejects each connection
        self._gate.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in {**OPTIONS, zmq.ROUTER_MANDATORY: 1}.items():
            self._socket.setsockopt(option, value)
        self._socket.curve_server = True
        self._socket.curve_secretkey = secret
        self._socket.zap_domain = b"rankscope"
        bound = self._bind(address)
        addresses = candidate_addresses(master) if address is None else (address,)
        endpoints = tuple(tcp_endpoint(each, bound) for each in addresses)
        self.invitation = Invitation(endpoints, public.decode(), client_secret.decode())

    def _bind(self, address: str | None) -> int:
        where = tcp_endpoint("*" if address is None else address, 0)
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            self.close()
            raise HostsError(f"cannot listen on {where}: {error}") from error
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def hosts(self) -> tuple[int, ...]:
        """Hosts that have connected so far, in order."""
        return tuple(sorted(self._peers))

    def poll(self) -> list[tuple[int, bytes]]:
        """Return new frames from other hosts, those of a connection in order."""
        found: list[tuple[int, bytes]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                self._judge(self._gate.recv_multipart(zmq.NOBLOCK))
        with contextlib.suppress(zmq.Again):
            while len(found) < MOST_AT_ONCE:
                route, name, frame, *beat = self._socket.recv_multipart(zmq.NOBLOCK)
                (host,) = HOST.unpack(name)
                if host in self._peers and self._peers[host].route != route:
                    self._behind.add(host)
                self._peers[host] = _Peer(route, time.monotonic())
                if not beat:
                    found.append((host, frame))
                elif beat[0] == GOODBYE:
                    self._left.add(host)
                else:
                    self._hand(route, frame, *beat)
        return found

    def take_behind(self) -> set[int]:
        """Return hosts that may have missed a frame: their connection is new, or had no room."""
        behind = self._behind
        self._behind = set()
        return behind

    def send(self, host: int, frame: bytes) -> bool:
        """Send a frame to a host's agent; return False if it is lost: no connection or no room."""
        if host not in self._peers:
            return False
        sent = self._hand(self._peers[host].route, frame)
        if not sent:
            self._behind.add(host)
        return sent

    def silent_seconds(self, host: int) -> float:
        """Return the seconds since a host's last frame; a live one beats each second."""
        peer = self._peers.get(host)
        return float("inf") if peer is None else time.monotonic() - peer.received_at

    def close(self, seconds: float = 0.0) -> None:
        """Wait up to so long until all hosts have left, and close the sockets."""
        until = time.monotonic() + seconds
        while self._peers.keys() - self._left and time.monotonic() < until:
            self.poll()
            time.sleep(0.01)
        self._peers.clear()
        self._context.destroy(linger=200)

    def _hand(self, *parts: bytes) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:  # no room, or no such connection
            return False
        return True

    def _judge(self, request: list[bytes]) -> None:
        """Accept or reject a connection (RFC 27, ZAP): only the key of the job is accepted."""
        version, number, _, _, _, mechanism, *credentials = request
        known = mechanism == b"CURVE" and len(credentials) == 1
        known = known and secrets.compare_digest(z85.encode(credentials[0]), self._client_key)
        status, text = (b"200", b"OK") if known else (b"400", b"another job")
        self._gate.send_multipart([version, number, status, text, b"agent" if known else b"", b""])


QUEUED_FRAMES = 100  # in ZeroMQ's queue; more wait in one of ours, whose bytes are counted

MOST_BYTES = 64 << 20  # with a longer queue, steps are dropped
BEAT_SECONDS = 1.0  # seconds from one beat to the next

SEARCH_SECONDS = 30.0  # without a frame from the root, until all of its addresses are tried again

NEXT_SECONDS = 0.25  # seconds to wait for an answer before the next address is tried as well


class HostLink:
    """The link of a host to the root; never blocks or fails while the root is away."""

    def __init__(self, host: int) -> None:
        self._name = HOST.pack(host)
        self._invitation: Invitation | None = None
        self._line: deque[bytes] = deque()
        self.backlog_bytes = 0
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._chosen: zmq.Socket[bytes] | None = None
        self._untried: list[str] = []
        self._beat = self._answered = 0  # numbers of the last beat, and of the last that came back
        self._received_at = self._searched_at = self._tried_at = self._beat_at = -inf

    def open(self, invitation: bytes) -> None:
        """Start to search for the root by its invitation; frames wait until the root answers."""
        self._invitation = Invitation.decode(invitation)

    def send(self, frame: bytes, *, lasting: bool = False) -> bool:
        """Send or queue a frame; return False if it was dropped. A lasting one never is."""
        if not lasting and self.backlog_bytes + len(frame) > MOST_BYTES:
            return False
        self._line.append(frame)
        self.backlog_bytes += len(frame)
        self._push()
        return True

    def poll(self) -> list[bytes]:
        """Return new frames from the root. Call it at least once a second."""
        now = time.monotonic()
        self._search(now)
        places = tuple(self._sockets.values())
        found = [frame for place in places for frame in self._receive(place)]
        self._push()
        if self._chosen is not None and now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._send_beat(self._chosen)
        return found

    def close(self, linger_seconds: float = 0.0) -> bool:
        """Wait up to so long until the root has read all frames, close; return whether it has."""
        until = time.monotonic() + linger_seconds
        while self._line and time.monotonic() < until:
            self._wait()
        last = self._beat + 1
        self._beat_at = -inf
        while self._answered < last and time.monotonic() < until:
            self._wait()
        if self._chosen is not None:
            self._hand(self._chosen, b"", GOODBYE)
            self._chosen = None
        self._context.destroy(linger=200)
        return not self._line and self._answered >= last

    def _wait(self) -> None:
        self.poll()  # incoming frames are dropped now
        time.sleep(0.01)

    def _search(self, now: float) -> None:
        """Try the root's addresses, one after the other; the first that answers is chosen."""
        if self._invitation is None:
            return
        if now - max(self._received_at, self._searched_at) >= SEARCH_SECONDS:
            self._searched_at = now
            self._untried = [e for e in self._invitation.endpoints if e not in self._sockets]
        if self._untried and now - self._tried_at >= NEXT_SECONDS:
            self._tried_at = now
            self._send_beat(self._open(self._untried.pop(0), self._invitation))

    def _open(self, endpoint: str, invitation: Invitation) -> "zmq.Socket[bytes]":
        place = self._context.socket(zmq.DEALER)
        for option, value in {**OPTIONS, zmq.SNDHWM: QUEUED_FRAMES}.items():
            place.setsockopt(option, value)
        place.curve_serverkey = invitation.server_public.encode()
        secret = invitation.client_secret.encode()
        place.curve_secretkey = secret
        place.curve_publickey = zmq.curve_public(secret)
        place.connect(endpoint)
        self._sockets[endpoint] = place
        return place

    def _receive(self, place: "zmq.Socket[bytes]") -> list[bytes]:
        found: list[bytes] = []
        with contextlib.suppress(zmq.ZMQError):  # no more frames, or another socket was chosen
            while len(found) < MOST_AT_ONCE:
                frame, *beat = place.recv_multipart(zmq.NOBLOCK)
                self._received_at = time.monotonic()
                self._choose(place)
                if beat:
                    self._answered = max(self._answered, *BEAT.unpack(beat[0]))
                else:
                    found.append(frame)
        return found

    def _choose(self, chosen: "zmq.Socket[bytes]") -> None:
        self._untried.clear()
        self._chosen = chosen
        for endpoint, place in list(self._sockets.items()):
            if place is not chosen:
                place.close(linger=0)
                del self._sockets[endpoint]

    def _push(self) -> None:
        while self._line and self._chosen is not None and self._hand(self._chosen, self._line[0]):
            self.backlog_bytes -= len(self._line.popleft())

    def _send_beat(self, place: "zmq.Socket[bytes]") -> None:
        self._beat += 1
        self._hand(place, b"", BEAT.pack(self._beat))

    def _hand(self, place: "zmq.Socket[bytes]", *parts: bytes) -> bool:
        try:
            place.send_multipart([self._name, *parts], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True


SILENT_SECONDS = 10.0  # after this long without a frame, a host counts as out of reach
GIVE_UP_SECONDS = 120.0  # how long a host may be out of reach before its ranks count as ended

GIVE_UP_SECONDS_AT_END = 30.0  # the same once all other hosts' ranks have closed their scopes


class RemoteHosts:
    """The other hosts of a job; arguments as in :class:`RootLink`."""

    def __init__(self, address: str | None, master: str | None) -> None:
        self._link = RootLink(address, master=master)
        self._host_of: dict[int, int] = {}
        self._gone: set[int] = set()
        self._silent: set[int] = set()
        self.states: dict[int, ProcessState] = {}
        self.places: dict[int, CodePlace] = {}
        self._stacks: dict[int, Stack] = {}

    @property
    def invitation(self) -> bytes:
        """The bytes with which another host's agent can connect; secret."""
        return self._link.invitation.encode()

    def poll(self) -> list[Arrived]:
        """Return new frames from ranks on other hosts."""
        now = time.time()
        arrived = []
        frames = self._link.poll()
        for host in self._link.take_behind():
            self._link.send(host, pack(FrameKind.INTRODUCE))
        for host, content in frames:
            for frame in FrameReader().feed(content):
                if frame.kind == FrameKind.STATES:
                    self._learn(json.loads(frame.payload))
                    continue
                if frame.kind == FrameKind.HELLO:
                    self._host_of[frame.rank] = host
                arrived.append(Arrived(frame.rank, frame, now))
        return arrived

    def newly_silent(self) -> list[list[int]]:
        """Return the ranks of each host that has just gone out of reach."""
        silent = {h for h in self._link.hosts if self._link.silent_seconds(h) > SILENT_SECONDS}
        news = sorted(silent - self._silent)
        self._silent = silent
        return [self._ranks_of(host) for host in news]

    def given_up(self, *, at_end: bool) -> list[int]:
        """Return, once, each rank whose host has been out of reach for too long."""
        limit = GIVE_UP_SECONDS_AT_END if at_end else GIVE_UP_SECONDS
        ranks: list[int] = []
        for host in self._link.hosts:
            if host not in self._gone and self._link.silent_seconds(host) > limit:
                self._gone.add(host)
                ranks += self._ranks_of(host)
        return ranks

    def send(self, rank: int, content: bytes) -> None:
        """Send a frame to the host of a rank, or to all hosts."""
        if rank == ALL_RANKS:
            for host in self._link.hosts:
                self._link.send(host, content)
        elif rank in self._host_of:
            self._link.send(self._host_of[rank], content)

    def take_stacks(self) -> dict[int, Stack]:
        """Return stacks that have arrived since the last call."""
        come = self._stacks
        self._stacks = {}
        return come

    def close(self, seconds: float) -> None:
        """Send the remaining frames and close the links."""
        self._link.close(seconds)

    def _ranks_of(self, host: int) -> list[int]:
        return [rank for rank, each in self._host_of.items() if each == host]

    def _learn(self, report: Mapping[str, Mapping[str, object]]) -> None:
        for rank, state in report.get("states", {}).items():
            self.states[int(rank)] = ProcessState(str(state))
        for rank, place in report.get("places", {}).items():
            self.places[int(rank)] = CodePlace(*place)  # type: ignore[misc]
        self._stacks |= {int(r): s for r, s in report.get("stacks", {}).items()}  # type: ignore[misc]
