"""The root's end of the links between the agents of several hosts."""

import secrets
import time
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from rankscope.agent.addresses import candidate_addresses, tcp_endpoint
from rankscope.agent.lane import KEPT_BYTES, Lane
from rankscope.agent.letters import (
    MOST_AT_ONCE,
    OPTIONS,
    TURN_SECONDS,
    HostsError,
    Invitation,
    Letter,
    milliseconds,
    parts_of,
    read_letter,
)


@dataclass(slots=True)
class _Peer:
    session: int
    lane: Lane
    route: bytes
    heard_at: float


class RootLink:
    """The root's end.

    Args:
        address: Where to listen; all addresses of this host by default.
        port: A port; 0 for any that is free.
        master: Name or address of the training's store, which tells what to advertise.
        kept_bytes: What may wait for each host.

    Raises:
        HostsError: The address cannot be listened on.
    """

    def __init__(
        self,
        address: str | None = None,
        port: int = 0,
        *,
        master: str | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._kept_bytes = kept_bytes
        self._peers: dict[int, _Peer] = {}
        self._looked_at = 0.0
        public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._client_key = client_public
        self._context = zmq.Context(io_threads=1)
        self._gate = self._context.socket(zmq.REP)  # asked about every connection, before it works
        self._gate.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in {**OPTIONS, zmq.ROUTER_MANDATORY: 1}.items():
            self._socket.setsockopt(option, value)
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.zap_domain = secret, b"rankscope"
        bound = self._bind(address, port)
        addresses = candidate_addresses(master) if address is None else (address,)
        endpoints = tuple(tcp_endpoint(each, bound) for each in addresses)
        self.invitation = Invitation(endpoints, public.decode(), client_secret.decode())
        self._poller = zmq.Poller()
        for each in (self._gate, self._socket):
            self._poller.register(each, zmq.POLLIN)

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
        """The first of the addresses that the invitation names."""
        return self.invitation.endpoints[0]

    @property
    def hosts(self) -> tuple[int, ...]:
        """Hosts that have been heard so far, in order."""
        return tuple(sorted(self._peers))

    def poll(self, timeout_seconds: float) -> list[tuple[int, bytes]]:
        """Return frames of other hosts: each once, those of a host in order.

        Args:
            timeout_seconds: How long to wait for the first. Call it at least once a second.
        """
        until = time.monotonic() + timeout_seconds
        while True:
            left = min(max(until - time.monotonic(), 0.0), TURN_SECONDS)
            ready = dict(self._poller.poll(milliseconds(left)))
            if self._gate in ready:
                self._judge()
            found, heard = self._receive()
            now = time.monotonic()
            if now - self._looked_at >= TURN_SECONDS:
                self._looked_at, heard = now, set(self._peers)
            for host in heard:
                self._push(self._peers[host], host)
            if found or now >= until:
                return found

    def send(self, host: int, payload: bytes) -> bool:
        """Send a frame to a host's agent; it waits while the host is out of reach.

        Returns:
            False where the host has not been heard yet, or too much waits for it.
        """
        peer = self._peers.get(host)
        if peer is None or not peer.lane.put(payload):
            return False
        self._push(peer, host)
        return True

    def silent_seconds(self, host: int) -> float:
        """Return how long ago a host was heard; a live one speaks each second. Infinity: never."""
        peer = self._peers.get(host)
        return float("inf") if peer is None else time.monotonic() - peer.heard_at

    def missing(self, host: int) -> list[tuple[int, int]]:
        """Return the ranges of steps ``(first, last)`` that a host had to leave out, in order."""
        return self._peers[host].lane.missing if host in self._peers else []

    def flush(self, seconds: float) -> bool:
        """Wait until all hosts have what was sent to them; what comes in meanwhile is dropped.

        Returns:
            Whether they have.
        """
        until = time.monotonic() + seconds
        while any(not peer.lane.is_empty for peer in self._peers.values()):
            if time.monotonic() >= until:
                return False
            self.poll(0.01)
        return True

    def close(self) -> None:
        """Close the sockets; a second call does nothing."""
        self._context.destroy(linger=200)

    def _receive(self) -> tuple[list[tuple[int, bytes]], set[int]]:
        found, heard = [], set()
        for _ in range(MOST_AT_ONCE):
            try:
                route, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            letter = read_letter(parts)
            peer = None if letter is None else self._peer_of(letter, route)
            if letter is None or peer is None:
                continue
            heard.add(letter.host)
            payload = peer.lane.take(letter.packet, letter.expected, peer.heard_at)
            if payload is not None:
                found.append((letter.host, payload))
        return found, heard

    def _peer_of(self, letter: Letter, route: bytes) -> _Peer | None:
        """Return whom it is from; an agent that was started later takes its predecessor's place."""
        peer = self._peers.get(letter.host)
        if peer is not None and letter.session < peer.session:
            return None
        if peer is None or letter.session > peer.session:
            lane = Lane(kept_bytes=self._kept_bytes)
            peer = self._peers[letter.host] = _Peer(letter.session, lane, route, 0.0)
        peer.route, peer.heard_at = route, time.monotonic()
        return peer

    def _push(self, peer: _Peer, host: int) -> None:
        now = time.monotonic()
        while (packet := peer.lane.next(now)) is not None:
            parts = [peer.route, *parts_of(packet, host, peer.session, peer.lane.expected)]
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError:  # no room, or gone: it will be heard when it is back
                return
            peer.lane.handed(packet, now)

    def _judge(self) -> None:
        """Answer whether a connection is allowed (RFC 27, ZAP): only with the key of the job."""
        version, number, _, _, _, mechanism, *credentials = self._gate.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1
        known = known and secrets.compare_digest(z85.encode(credentials[0]), self._client_key)
        status, text = (b"200", b"OK") if known else (b"400", b"another job")
        self._gate.send_multipart([version, number, status, text, b"agent" if known else b"", b""])
