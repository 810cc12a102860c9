"""The links to other hosts, at the root's end."""

import contextlib
import secrets
import time
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from rankscope.agent.addresses import candidate_addresses, tcp_endpoint
from rankscope.agent.hosts import GOODBYE, HOST, MOST_AT_ONCE, OPTIONS, HostsError, Invitation


@dataclass(slots=True)
class _Peer:
    route: bytes  # of its connection; each connection has another one
    received_at: float


class RootLink:
    """The root's end of the links to other hosts.

    Args:
        address: Where to listen; all addresses of this host by default.
        port: A port; 0 for any that is free.
        master: Name or address of the training's store, from which the advertised addresses follow.

    Raises:
        HostsError: The address cannot be listened on.
    """

    def __init__(
        self, address: str | None = None, port: int = 0, *, master: str | None = None
    ) -> None:
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
        bound = self._bind(address, port)
        addresses = candidate_addresses(master) if address is None else (address,)
        endpoints = tuple(tcp_endpoint(each, bound) for each in addresses)
        self.invitation = Invitation(endpoints, public.decode(), client_secret.decode())

    def _bind(self, address: str | None, port: int) -> int:
        where = tcp_endpoint("*" if address is None else address, port)
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            self.close()
            raise HostsError(f"cannot listen on {where}: {error}") from error
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def endpoint(self) -> str:
        """The first address of the invitation."""
        return self.invitation.endpoints[0]

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
        """Wait up to so long until all hosts have left, and close the sockets.

        Frames that arrive meanwhile are dropped. A second call does nothing.
        """
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
